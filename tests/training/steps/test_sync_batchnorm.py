"""Batch statistics over all ranks: N ranks train like one process, whatever the layer, the shares and the precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator, SoloCommunicator
from tests.training._fit_ranks import UNEVEN, alone, assert_as_one, on_ranks, precision
from tests.training._ring import run_ring

pytestmark = pytest.mark.slow
TWO = (slice(0, 3), slice(3, 12))


@settings(deadline=None)  # the first call imports TensorFlow
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.floats(-1e6, 1e6),
    st.integers(0, 1000),
)
def test_merged_moments_are_those_of_all_rows(rows: list[int], offset: float, seed: int) -> None:
    """Also far from zero, where a sum of squares would lose every digit, and with ranks that have no row."""
    from lockstep.training.steps.batchnorm import merged

    parts = [offset + np.random.default_rng([seed, i]).standard_normal((n, 3)) for i, n in enumerate(rows)]
    everything = np.concatenate(parts)
    gathered = [
        np.concatenate([np.full(3, len(p)), p.mean(0), np.square(p - p.mean(0)).sum(0)]) if len(p) else np.zeros(9)
        for p in parts
    ]
    mean, variance, divisor, shift = merged(np.array(gathered, np.float64))
    np.testing.assert_allclose(mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, everything.var(0), rtol=1e-6, atol=1e-9)
    assert divisor.tolist() == [sum(rows)] * 3
    np.testing.assert_allclose(shift, 0, atol=1e-6)


def images() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((12, 6, 6, 2)) * 3 + 1, {"out": rng.integers(0, 3, 12)}


def conv_net() -> Any:
    """Two branches whose order an executor may choose, a nested model, a frozen layer, one that no loss sees."""
    import keras

    layers = keras.layers
    inputs = keras.Input((6, 6, 2))
    inner = keras.Sequential([layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization()])
    left = layers.ReLU()(inner(inputs))
    right = layers.BatchNormalization(momentum=0.5, renorm=True, center=False)(layers.Conv2D(4, 3)(inputs))
    joined = layers.BatchNormalization(trainable=False)(layers.Add()([left, right]))
    aside = layers.BatchNormalization(scale=False, center=False)(joined)
    out = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(joined))
    model = keras.Model(inputs, {"out": out, "aside": aside})
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), {"out": "sparse_categorical_crossentropy"})
    return model


def test_n_ranks_are_one_process_in_float64() -> None:
    """A hundred steps: five rounds of twenty batches, since a round costs Keras more than a step."""
    data: Any = (np.tile(images()[0], (20, 1, 1, 1)), {"out": np.tile(images()[1]["out"], 20)})
    with precision("float64"):
        plain = alone(conv_net, *data, steps=5, batches=20)
        assert_as_one(plain, on_ranks(conv_net, *data, steps=5, batches=20, shares=TWO, sync=True))


def apply(layer: Any, x: np.ndarray, mask: Any, weights: np.ndarray, moments: Any = None, calls: Any = None) -> Any:
    """A layer's output, the gradients of a weighted sum of it by x, gamma and beta, and the moving averages."""
    import contextlib

    import keras
    import tensorflow as tf

    from lockstep.training.steps.batchnorm import batchnorm_as

    layer.build(x.shape)
    model = keras.Sequential([layer])
    with batchnorm_as(model, of_ranks=moments), calls.tracing() if calls else contextlib.nullcontext():
        given = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(given)
            out = layer(given, training=True, mask=mask)
            loss = tf.reduce_mean(tf.cast(out, weights.dtype) * weights)
        gradients = tape.gradient(loss, [given, *(v.value for v in layer.trainable_variables)])
    assert type(layer) is keras.layers.BatchNormalization, "Keras' own again"
    return np.asarray(out), [np.asarray(g) for g in gradients], [np.asarray(v) for v in layer.non_trainable_variables]


@pytest.mark.parametrize(
    ("shape", "masked", "options"),
    [
        ((12, 5), False, {}),
        ((12, 4, 3, 2), False, {}),
        ((12, 3, 4), False, {"axis": 1}),
        ((12, 4, 3), True, {}),  # Keras divides by count + epsilon there
        ((12, 5), False, {"dtype": "mixed_float16"}),  # statistics in float32
        ((12, 5), False, {"dtype": "mixed_bfloat16"}),
    ],
)
def test_a_layer_over_ranks_is_the_layer_over_all_rows(
    shape: tuple[int, ...], masked: bool, options: dict[str, Any]
) -> None:
    import keras

    from lockstep.training.steps.batchnorm import SyncMoments
    from lockstep.training.steps.ordered import OrderedCalls

    low = "dtype" in options
    dtype = np.float32 if low else np.float64
    rng = np.random.default_rng(1)
    x, weights = (rng.standard_normal(shape).astype(dtype) * 2 + 1 for _ in range(2))
    mask = None
    if masked:
        mask = rng.random(shape[:-1]) < 0.6
        mask[UNEVEN[1]] = False  # a rank whose rows are all masked
    with precision("float32" if low else "float64"):
        layers = [keras.layers.BatchNormalization(momentum=0.5, **options) for _ in range(4)]
        out, gradients, moving = apply(layers[3], x, mask, weights)

        def one(comm: Communicator) -> Any:
            rows = UNEVEN[comm.rank]
            scale = (rows.stop - rows.start) / 12
            calls = OrderedCalls(comm)
            part = None if mask is None else mask[rows]
            return scale, apply(layers[comm.rank], x[rows], part, weights[rows], SyncMoments(calls, scale), calls)

        ranks = run_ring(3, one)
    tolerance: Any = {"rtol": 5e-3 if low else 1e-12, "atol": 1e-2 if low else 1e-14}
    np.testing.assert_allclose(np.concatenate([r[0] for _, r in ranks]).astype(dtype), out.astype(dtype), **tolerance)
    # The exchange multiplies by the share and adds; rows of x belong to one rank alone.
    np.testing.assert_allclose(np.concatenate([s * r[1][0] for s, r in ranks]), gradients[0], **tolerance)
    for i in (1, 2):
        np.testing.assert_allclose(np.sum([s * r[1][i] for s, r in ranks], axis=0), gradients[i], **tolerance)
    for i, value in enumerate(moving):
        assert all(np.array_equal(ranks[0][1][2][i], r[2][i]) for _, r in ranks)
        np.testing.assert_allclose(ranks[0][1][2][i], value, **tolerance)


def test_what_is_refused() -> None:
    """Collectives in a loop have no order that all ranks share; a gradient of a gradient would be wrong in silence."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.batchnorm import SyncMoments, batchnorm_as
    from lockstep.training.steps.ordered import OrderedCalls

    calls = OrderedCalls(SoloCommunicator())
    moments = SyncMoments(calls, 1.0)
    x = tf.ones((4, 3))

    class OwnStatistics(keras.layers.BatchNormalization):
        def _moments(self, inputs: Any, mask: Any) -> Any:
            return 0.0, 1.0

    class OwnCall(keras.layers.BatchNormalization):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return super().call(inputs, training=training, mask=mask)

    cases: list[Any] = [
        (OwnStatistics(), {"of_ranks": moments}, "code of its own"),
        (OwnCall(), {"group_rows": 2}, "code of its own"),
        (keras.layers.BatchNormalization(renorm=True), {"group_rows": 2}, "renorm of its own"),
    ]
    for layer, options, message in cases:
        with pytest.raises(ConfigError, match=message), batchnorm_as(keras.Sequential([layer]), **options):
            raise AssertionError("was not refused")

    layer = OwnCall()  # calls Keras' own: its statistics are known
    model = keras.Sequential([layer])
    with batchnorm_as(model, of_ranks=moments), calls.tracing():
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = tf.reduce_sum(layer(x, training=True) ** 3)
            first = inner.gradient(out, x)
        with pytest.raises(ConfigError, match="second derivative"):
            outer.gradient(first, x)
        with pytest.raises(ConfigError, match="Exception encountered"):  # Keras' own words around it
            tf.function(lambda: layer(x, training=True), autograph=False)()
        with pytest.raises(ConfigError, match="a loop, a branch"):
            raise calls.error or AssertionError


def test_a_users_own_layers_become_ghosts() -> None:
    """Ranks that own 1 and 3 of 4 groups normalise as one rank does; names and classes stay Keras' own."""

    def make() -> Any:
        import keras

        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((12, 5)), rng.standard_normal((12, 1))
    with precision("float64"):
        (one,) = on_ranks(make, x, y, shares=[slice(0, 12)], steps=10, group_rows=3)
        assert_as_one(one, on_ranks(make, x, y, shares=TWO, steps=10, group_rows=3))
        plain = alone(make, x, y, steps=10)
    assert [(type(layer), layer.name) for layer in plain.layers] == [(type(layer), layer.name) for layer in one.layers]
    assert not np.allclose(np.asarray(plain.variables[0]), np.asarray(one.variables[0]))


def test_micro_batches_move_averages_once_a_step() -> None:
    """By the mean of all rows, whichever of them come last: these depend on the number of ranks. In eager steps."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.rank_step import MicroStatistics

    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(keras.optimizers.SGD(0.0, gradient_accumulation_steps=2))
    micro, expected = MicroStatistics(model, 2), np.zeros(3)
    for rows in np.random.default_rng(3).standard_normal((2, 8, 3)).astype(np.float32):  # two steps
        for part in (rows[:4], rows[4:]):
            with micro.step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(part, training=True))
                gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
                model.optimizer.apply(gradients, model.trainable_variables)
        expected = 0.5 * expected + 0.5 * rows.mean(axis=0)
        np.testing.assert_allclose(layer.moving_mean.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert "apply" not in vars(model.optimizer)


def test_a_run_of_three_ranks_with_sync_is_the_run_of_one(tmp_path: Path) -> None:
    """4 lanes on 3 ranks, whose rows differ; there may be more ranks than ghosts have lane groups."""
    from lockstep.training.config import TrainConfig
    from lockstep.training.driver.preflight import plan_for
    from tests.training._threads import final_tensors, run
    from tests.training._tiny import write_images
    from tests.training.rank.test_fit import assert_same

    manifest = write_images(tmp_path / "images", records={"train": 48, "test": 8})
    tensors = []
    for ranks in (1, 3):
        url = str(tmp_path / f"run-{ranks}")
        config = TrainConfig(
            datasets=(str(tmp_path / "images"),),
            run=url,
            num_ranks=ranks,
            model="tests.training._models:small_conv",
            global_batch=12,
            lanes=4,
            epochs=2,
            batchnorm="sync",
            precision="float64",
            launcher="local",
        )
        assert run(config).steps == 8
        tensors.append(final_tensors(url))
        assert plan_for(manifest, config.but(num_ranks=9, lanes=12)).lanes == 12
    assert_same(*tensors)
