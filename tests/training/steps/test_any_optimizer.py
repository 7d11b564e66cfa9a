"""N ranks step as one rank of plain Keras does, with every optimizer that Keras has, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._fit_ranks import precision
from tests.training._own_steps import ROWS, Batch, Learner, assert_as_one, batches, on_ranks

pytestmark = pytest.mark.slow
UNEVEN = [slice(0, 3), slice(3, 4), slice(4, 12)]
TWO = [slice(0, 3), slice(3, 12)]
NOT_TRAINED_WITH = {"Optimizer", "OptimizerMap", "LossScaleOptimizer", "MultiOptimizer"}  # the last two need others


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """Keras' Muon takes the dtype of some constants from floatx."""
    with precision("float64"):
        yield


def optimizers() -> dict[str, Callable[[], Any]]:
    """A way to make each of Keras' optimizers, and combinations."""
    import keras

    o = keras.optimizers
    classes = {name: getattr(o, name) for name in dir(o) if isinstance(getattr(o, name), type)}
    plain = {name: one for name, one in classes.items() if name not in NOT_TRAINED_WITH}
    made: dict[str, Callable[[], Any]] = {name: partial(one, learning_rate=0.01) for name, one in plain.items()}

    def several() -> Any:
        parts = o.OptimizerMap(o.SGD(0.1, momentum=0.9, global_clipnorm=0.5))
        parts["w0"] = o.Muon(0.01)
        parts["b.*"] = o.Adam(0.01, gradient_accumulation_steps=2)
        return o.MultiOptimizer(parts)

    made["MultiOptimizer"] = several
    made["LossScaleOptimizer"] = lambda: o.LossScaleOptimizer(o.Lion(0.01), initial_scale=8.0, dynamic_growth_steps=2)
    made["LossScale of several"] = lambda: o.LossScaleOptimizer(several())
    made["SGD nesterov"] = lambda: o.SGD(0.1, momentum=0.9, nesterov=True, loss_scale_factor=16.0)
    made["SGD accumulating"] = lambda: o.SGD(0.1, momentum=0.9, loss_scale_factor=16.0, gradient_accumulation_steps=3)
    return made


def test_every_optimizer_of_keras() -> None:
    """Eager steps: as `run_eagerly=True`, and without the time for tracing."""
    made = optimizers()
    assert {"SGD", "Adam", "AdamW", "Lamb", "Muon", "Lion", "Adafactor", "ScheduleFreeAdamW"} <= set(made)
    data = batches(3)
    for name, make in made.items():
        plain = Learner(make(), eager=True)
        plain.run(data)
        ranks, seen = on_ranks(make, data, UNEVEN, learner=eager)
        try:
            assert_as_one(plain, ranks)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        pairs = zip(plain.weights, eager(make()).weights, strict=True)
        moved = max(float(np.abs(after.numpy() - before.numpy()).max()) for after, before in pairs)
        assert moved > 1e-5, f"{name} has not trained"
        assert seen[0] == seen[1] == seen[2]


def eager(optimizer: Any) -> Learner:
    return Learner(optimizer, eager=True)


class Masked(Learner):
    """Its loss is divided by the weights that a mask leaves: those of all ranks, whose `calls` reduce them first."""

    def __init__(self, optimizer: Any, dtype: str = "float64", calls: Any = None, scale: float = 1.0) -> None:
        super().__init__(optimizer, dtype)
        self.calls, self.scale = calls, scale

    def loss(self, x: Any, y: Any) -> Any:
        import keras
        import tensorflow as tf

        from lockstep.training.steps.losses import Denominators

        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        w1, b1, w2, b2 = (weight.value for weight in self.weights)
        y_pred = tf.tanh(x @ w1 + b1) @ w2 + b2
        keras.src.backend.set_keras_mask(y_pred, x[:, 0] > 0.3)  # at some steps nothing is left on rank 0
        weights = tf.abs(x[:, 1])
        if self.calls is None:
            return loss(y, y_pred, weights)
        with self.calls.tracing():
            return Denominators(self.calls, self.scale)._global(loss, y, y_pred, weights)


def masked_on_ranks(make: Any, data: list[Batch], dtype: str = "float64") -> tuple[list[Learner], list[list[Any]]]:
    """`Masked` learners of two uneven ranks, each with communicators for its exchange and for its loss."""
    from lockstep.training.steps.ordered import OrderedCalls

    comms = _threads._join(2, 1)
    waiting = [
        partial(Masked, dtype=dtype, calls=OrderedCalls(comm), scale=(rows.stop - rows.start) / ROWS)
        for comm, rows in zip(comms, TWO, strict=True)
    ]
    try:
        return on_ranks(make, data, TWO, bucket_bytes=128, learner=lambda optimizer: waiting.pop(0)(optimizer))
    finally:
        for comm in comms:
            comm.close()


SCALED = "loss scale"
CLIPNORM = {"clipnorm": 0.05, "use_ema": True, SCALED: True}
CLIPVALUE = {"clipvalue": 0.02, "gradient_accumulation_steps": 4, "weight_decay": 0.01}
ALL = {"global_clipnorm": 0.1, "gradient_accumulation_steps": 5, "use_ema": True, "weight_decay": 0.01, SCALED: True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("SGD", ALL, marks=pytest.mark.soak),
        ("SGD", CLIPNORM),
        pytest.param("Adam", ALL, marks=pytest.mark.soak),
        ("Adam", CLIPVALUE),
        ("AdamW", ALL),
        pytest.param("AdamW", CLIPVALUE, marks=pytest.mark.soak),
        ("Lamb", ALL),
        pytest.param("Lamb", CLIPNORM, marks=pytest.mark.soak),
    ],
)
def test_a_hundred_steps(name: str, options: dict[str, Any]) -> None:
    import keras

    chosen = {key: value for key, value in options.items() if key != SCALED}
    if name == "SGD":
        chosen["momentum"] = 0.9
    if "use_ema" in chosen:
        chosen["ema_overwrite_frequency"] = 7

    def make() -> Any:
        inner = getattr(keras.optimizers, name)(0.01, **chosen)
        # Powers of two: they change no digit, so plain Keras may grow its scale at other batches than ranks do.
        return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=20) if SCALED in options else inner

    data = batches(100)
    if options is ALL:  # and masks, and weights
        plain: Learner = Masked(make())
        losses = plain.run(data)
        ranks, seen = masked_on_ranks(make, data)
    else:
        plain = Learner(make())
        losses = plain.run(data)
        ranks, seen = on_ranks(make, data, TWO, bucket_bytes=128)
    if SCALED in options and "gradient_accumulation_steps" in options:
        for learner in (plain, *ranks):  # counted by cycles there
            learner.optimizer.step_counter.assign(0)
            learner.optimizer.dynamic_scale.assign(1.0)
    assert_as_one(plain, ranks)
    assert seen[0] == seen[1]
    every = chosen.get("gradient_accumulation_steps", 1)
    agreed = [agreement for pending, agreement in seen[0] if pending == 0]
    assert [agreement.step for agreement in agreed] == list(range(1, 100 // every + 1))
    means = np.array(losses[: len(agreed) * every]).reshape(-1, every).mean(axis=1)
    np.testing.assert_allclose([agreement.loss for agreement in agreed], means, rtol=1e-9)


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("Lamb", {})])
def test_losses_of_a_hundred_steps_in_float32(name: str, options: dict[str, Any]) -> None:
    import keras

    def make() -> Any:
        return getattr(keras.optimizers, name)(0.01, global_clipnorm=0.1, **options)

    data = batches(5, "float32") * 20
    plain = Masked(make(), "float32")
    losses = plain.run(data)
    _, seen = masked_on_ranks(make, data, "float32")
    np.testing.assert_allclose([agreement.loss for _, agreement in seen[0]], losses, rtol=0, atol=1e-4)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]), "it learns"


def test_accumulating_is_a_larger_batch() -> None:
    import keras

    data = batches(6)
    larger = [tuple(np.concatenate(parts) for parts in zip(*data[i : i + 3], strict=True)) for i in (0, 3)]
    plain = Learner(keras.optimizers.AdamW(0.01, global_clipnorm=0.1), eager=True)
    plain.run(larger)  # type: ignore[arg-type]  # pairs, which a generator hides
    make = partial(keras.optimizers.AdamW, 0.01, global_clipnorm=0.1, gradient_accumulation_steps=3)
    ranks, seen = on_ranks(make, data, TWO, learner=eager)
    for mine, *others in zip(plain.weights, *(learner.weights for learner in ranks), strict=True):
        for other in others:
            np.testing.assert_allclose(other.numpy(), mine.numpy(), rtol=1e-12)
    assert [pending for pending, _ in seen[0]] == [1, 2, 0] * 2, "one exchange in three batches"


class OneScalar(Learner):
    """Variables and loss of bfloat16, one of them a scalar, of which eager TensorFlow makes no array."""

    shapes = ((5, 7), (7,), (7, 1), ())

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "bfloat16", eager=True)


def test_a_scalar_of_bfloat16_in_eager_steps() -> None:
    import keras
    import ml_dtypes

    data = [(x.astype(ml_dtypes.bfloat16), y.astype(ml_dtypes.bfloat16)) for x, y in batches(2)]
    make = partial(keras.optimizers.SGD, 0.1, gradient_accumulation_steps=2)
    for shares in (TWO, [slice(0, 12)]):
        ranks, seen = on_ranks(make, data, shares, learner=OneScalar)
        assert float(ranks[0].weights[3].numpy()) != float(OneScalar(make()).weights[3].numpy()), "it has moved"
        assert [pending for pending, _ in seen[0]] == [1, 0]
