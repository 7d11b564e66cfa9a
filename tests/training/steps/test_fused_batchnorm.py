"""TensorFlow's fused kernel in place of Keras' operations: the same numbers and gradients, to rounding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.training import _threads  # noqa: F401 - sets TensorFlow's threads before it makes them

pytestmark = pytest.mark.slow


def small_net(**options: Any) -> Any:
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    layers = [
        keras.Input((6, 5, 3)),
        keras.layers.Conv2D(4, 3, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.8, **options),
        keras.layers.ReLU(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.3), loss, jit_compile=False)
    return model


def trained(group_rows: int | None, fuses: bool, **options: Any) -> tuple[list[np.ndarray], int]:
    """Weights after four steps, and how often the kernel stands in the step's graph."""
    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.fused import can_fuse_batchnorm
    from lockstep.training.steps.fused import normalise as plain
    from lockstep.training.steps.rank_step import RankStep

    rng = np.random.default_rng(2)
    x = (rng.standard_normal((12, 6, 5, 3)) * 3 + 5).astype(np.float32)
    y = rng.integers(0, 3, 12)
    model, made = small_net(**options), []
    communicator = SoloCommunicator()
    distribute(model.optimizer, communicator)
    RankStep(1.0, group_rows=group_rows).install(model, communicator)

    def normalise(*args: Any) -> Any:
        made.append(args)
        return plain(*args)

    can = can_fuse_batchnorm if fuses else lambda *args: False
    with (
        mock.patch("lockstep.training.steps.batchnorm.normalise", normalise),
        mock.patch("lockstep.training.steps.batchnorm.can_fuse_batchnorm", can),
    ):
        model.fit(x, y, batch_size=12, epochs=4, shuffle=False, verbose=0)
    return model.get_weights(), len(made)


@pytest.mark.parametrize(
    ("group_rows", "options"),
    [
        (None, {}),
        (4, {}),  # three groups, each a call of the kernel
        (12, {}),  # one group, which needs no cutting
        (4, {"scale": False, "center": False}),
    ],
)
def test_the_same_weights_and_moving_averages(group_rows: int | None, options: dict[str, Any]) -> None:
    fused, times = trained(group_rows, True, **options)
    plain, never = trained(group_rows, False, **options)
    assert times >= 1 and never == 0
    for mine, other in zip(fused, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)


def test_what_the_kernel_cannot_do_stays_keras() -> None:
    import keras
    import tensorflow as tf

    from lockstep.training.steps.fused import can_fuse_batchnorm

    layer = keras.layers.BatchNormalization()
    batch = tf.zeros((4, 3, 3, 2))
    assert can_fuse_batchnorm(layer, batch, None)
    assert not can_fuse_batchnorm(layer, batch, tf.ones((4, 3, 3)))
    assert not can_fuse_batchnorm(layer, tf.zeros((4, 2)), None)
    assert not can_fuse_batchnorm(layer, tf.zeros((0, 3, 3, 2)), None)
    assert not can_fuse_batchnorm(keras.layers.BatchNormalization(axis=1), batch, None)
    assert not can_fuse_batchnorm(keras.layers.BatchNormalization(renorm=True), batch, None)
    assert not can_fuse_batchnorm(
        keras.layers.BatchNormalization(dtype="mixed_float16"), tf.cast(batch, tf.float16), None
    )
    assert not can_fuse_batchnorm(keras.layers.BatchNormalization(dtype="float64"), tf.cast(batch, tf.float64), None)
