"""Ghost batch normalisation against Keras' own, group by group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError

pytestmark = pytest.mark.slow


def layer(group_rows: int = 4, **options: Any) -> Any:
    import keras

    from lockstep.training.steps.batchnorm import GhostBatchNormalization

    keras.utils.set_random_seed(2)
    options = {"momentum": 0.5, "gamma_initializer": "normal", "beta_initializer": "normal"} | options
    return GhostBatchNormalization(group_rows, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((12, 5), {}),
        ((12, 4, 3, 2), {}),  # images
        ((12, 2, 3), {"axis": 1}),  # channels first
        ((12, 5), {"scale": False, "center": False}),
    ],
)
def test_each_group_is_normalised_like_a_batch_of_its_own(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    import keras

    ghost = layer(**options)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 3 + 1
    out = np.asarray(ghost(x, training=True))
    moving = [np.asarray(v) for v in (ghost.moving_mean, ghost.moving_variance)]
    plain = keras.layers.BatchNormalization(momentum=0.5, **options)
    plain.build(shape)
    learnt = [np.asarray(v) for v in ghost.trainable_variables]
    means = []
    for start in range(0, 12, 4):
        plain.set_weights([*learnt, np.zeros_like(moving[0]), np.ones_like(moving[1])])
        expected = np.asarray(plain(x[start : start + 4], training=True))
        np.testing.assert_allclose(out[start : start + 4], expected, rtol=1e-4, atol=1e-5)
        means.append([np.asarray(v) for v in (plain.moving_mean, plain.moving_variance)])
    for mine, of_groups in zip(moving, zip(*means, strict=True), strict=True):
        np.testing.assert_allclose(mine, np.mean(of_groups, axis=0), rtol=1e-5, atol=1e-6)


def test_inference_and_frozen_layers_use_the_moving_averages() -> None:
    ghost = layer()
    x = np.ones((3, 5), np.float32)  # no whole group: only training needs that
    before = np.asarray(ghost(x, training=False))
    ghost.trainable = False
    np.testing.assert_array_equal(np.asarray(ghost(x, training=True)), before)


def test_half_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole groups of 4 rows"):
        layer()(np.ones((6, 5), np.float32), training=True)


def test_float64_stays_float64() -> None:
    ghost = layer(dtype="float64")
    x = np.random.default_rng(0).standard_normal((8, 5))
    out = np.asarray(ghost(x, training=True)).reshape(2, 4, 5)
    assert out.dtype == np.float64
    beta = np.asarray(ghost.beta)
    np.testing.assert_allclose(out.mean(axis=1), np.broadcast_to(beta, (2, 5)), rtol=0, atol=1e-15)


@pytest.mark.parametrize("options", [{"group_rows": 0}, {"renorm": True}, {"synchronized": True}])
def test_what_a_ghost_layer_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="got invalid arguments"):
        layer(**({"group_rows": 4} | options))
