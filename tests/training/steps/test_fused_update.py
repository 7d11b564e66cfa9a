"""TensorFlow's update kernels in place of Keras' operations: the same numbers, to rounding, and the same variables."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.training import _threads  # noqa: F401 - sets TensorFlow's threads before it makes them
from tests.training._own_steps import Learner, assert_as_one, batches

pytestmark = pytest.mark.slow
CYCLES = {"gradient_accumulation_steps": 3, "weight_decay": 0.01, "global_clipnorm": 0.3, "loss_scale_factor": 16.0}
AVERAGED = {"use_ema": True, "ema_overwrite_frequency": 4, "clipnorm": 0.2}


def alone(make: Any) -> tuple[Learner, list[Any]]:
    """A learner whose optimizer is distributed over one rank, and the variables that the kernels update."""
    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps import fused as fused_update
    from lockstep.training.steps.distribute import distribute

    learner, fused = Learner(make()), []
    plain = fused_update.update

    def update(*args: Any) -> None:
        fused.append(args[2])
        plain(*args)

    step = learner._step

    def watched(*args: Any) -> Any:  # while it is traced
        with mock.patch("lockstep.training.steps.fused.update", update):
            return step(*args)

    import tensorflow as tf

    learner.optimizer = distribute(learner.optimizer, SoloCommunicator(), 1.0)
    learner.step = tf.function(watched, autograph=False)
    return learner, fused


@pytest.mark.parametrize(
    ("name", "options", "updates"),
    [
        ("SGD", {"weight_decay": 0.01, "clipvalue": 0.05}, 4),
        ("SGD", {"momentum": 0.9}, 4),
        ("SGD", {"momentum": 0.5, "nesterov": True, **CYCLES}, 4),
        # Large enough to tell whether it is added to the root or to what the root is taken of.
        ("Adam", {"epsilon": 0.05, "beta_1": 0.7, "beta_2": 0.95, **AVERAGED}, 4),
        ("Adam", {"epsilon": 0.01, **CYCLES}, 4),  # its powers count cycles, not batches
        ("AdamW", {"epsilon": 0.01, "weight_decay": 0.05}, 4),
        ("Adam", {"amsgrad": True}, 0),  # Keras' own, as all others
    ],
)
def test_a_kernel_does_what_keras_does(name: str, options: dict[str, Any], updates: int) -> None:
    import keras

    def make() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.7)
        return getattr(keras.optimizers, name)(rate, **options)

    data = batches(50)
    plain = Learner(make())
    plain.run(data)
    mine, fused = alone(make)
    mine.run(data)
    assert len({id(variable) for variable in fused}) == updates
    assert_as_one(plain, [mine])


def test_a_rate_that_a_callback_sets_counts_at_once() -> None:
    import keras

    data = batches(8)
    plain, mine = Learner(keras.optimizers.Adam(0.01)), alone(lambda: keras.optimizers.Adam(0.01))[0]
    for learner in (plain, mine):
        learner.run(data[:4])
        learner.optimizer.learning_rate = 0.2
        learner.run(data[4:])
    assert_as_one(plain, [mine])


def test_what_no_kernel_does_stays_keras() -> None:
    import keras
    import tensorflow as tf

    from lockstep.training.steps.fused import can_fuse_update

    class Own(keras.optimizers.SGD):
        """It might assign in its own way."""

    sgd, w = keras.optimizers.SGD(0.1), tf.Variable(np.ones((3, 2)))
    gradient = tf.ones((3, 2), tf.float64)
    half = tf.Variable(np.ones((3, 2), np.float16))
    rows = tf.IndexedSlices(gradient[:1], tf.constant([1]), tf.constant([3, 2]))
    assert can_fuse_update(keras.optimizers.SGD, sgd, gradient, w)
    assert not can_fuse_update(Own, Own(0.1), gradient, w)
    assert not can_fuse_update(keras.optimizers.SGD, sgd, rows, w)
    assert not can_fuse_update(keras.optimizers.SGD, sgd, tf.ones((3, 2)), w), "Keras casts"
    assert not can_fuse_update(keras.optimizers.SGD, sgd, tf.ones((1, 2), tf.float64), w), "Keras broadcasts"
    assert not can_fuse_update(keras.optimizers.SGD, sgd, tf.ones((3, 2), tf.float16), half)


def test_a_value_read_before_an_update_stays() -> None:
    """The kernels write in place: what was read of a variable before, without a copy, must not change."""
    import keras

    data = batches(3)
    learner, fused = alone(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    learner.run(data[:1])
    views = [np.asarray(variable.value.read_value()) for variable in learner.weights]
    again = [np.asarray(variable.value.read_value()) for variable in learner.weights]
    assert fused and all(np.shares_memory(*pair) for pair in zip(views, again, strict=True)), "else nothing is tried"
    before = [view.copy() for view in views]
    learner.run(data[1:])
    assert all(np.array_equal(view, copy) for view, copy in zip(views, before, strict=True))
