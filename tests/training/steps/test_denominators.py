"""Losses with masks, weights and other reductions: uneven ranks train like one process, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator, SoloCommunicator
from tests.training._fit_ranks import UNEVEN, alone, assert_as_one, on_ranks, precision
from tests.training._ring import run_ring

pytestmark = pytest.mark.slow
ROWS = 12


@pytest.fixture(autouse=True)
def float64() -> Any:
    with precision("float64"):
        yield


def sequences() -> np.ndarray:
    """(12, 5) of words 1 to 6, padded with 0 to uneven lengths; the one row of rank 1 is padding alone."""
    rng = np.random.default_rng(4)
    words = rng.integers(1, 7, (ROWS, 5))
    for row, length in enumerate(rng.integers(1, 6, ROWS)):
        words[row, length:] = 0
    words[UNEVEN[1]] = 0
    return words


def weights_of(kind: str, shape: tuple[int, ...]) -> np.ndarray | None:
    rng = np.random.default_rng(6)
    if kind == "none":
        return None
    weights = rng.random(shape) * 3
    if kind == "zero on a rank":
        weights[UNEVEN[2]] = 0
    return np.zeros(shape) if kind == "zero" else weights


def gradients(loss: Any, y: Any, pred: Any, mask: Any, weights: Any, *, denominators: Any = None) -> tuple[float, Any]:
    """The loss of a batch and its gradient by `pred`."""
    import keras
    import tensorflow as tf

    given = tf.constant(pred)
    with tf.GradientTape() as tape:
        tape.watch(given)
        y_pred = tf.nn.softmax(given)
        if mask is not None:
            keras.src.backend.set_keras_mask(y_pred, tf.constant(mask))
        value = loss(y, y_pred, weights) if denominators is None else denominators._global(loss, y, y_pred, weights)
    return float(tf.reduce_mean(value)), tape.gradient(value, given).numpy()


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum", "none"])
@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize(
    ("weighted", "ignored"),
    [
        ("none", None),
        ("some", 2),  # and a mask that the loss makes of the labels
        ("of rows", None),
        ("zero on a rank", 2),
        ("zero", None),
    ],
)
def test_the_sum_over_ranks_is_the_loss_of_all_rows(
    reduction: str, masked: str, weighted: str, ignored: int | None
) -> None:
    """Value and gradient; `some` masks all entries of one rank."""
    import keras

    from lockstep.training.steps.losses import Denominators
    from lockstep.training.steps.ordered import OrderedCalls

    rng = np.random.default_rng(1)
    y, pred = rng.integers(0, 4, (ROWS, 3)), rng.standard_normal((ROWS, 3, 4))
    mask = None if masked == "none" else (sequences()[:, :3] != 0) & (masked == "some")
    weights = weights_of(weighted, (ROWS, 1) if weighted == "of rows" else (ROWS, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction, ignore_class=ignored)
    value, gradient = gradients(loss, y, pred, mask, weights)

    def one(comm: Communicator) -> tuple[float, Any]:
        rows = UNEVEN[comm.rank]
        scale = (rows.stop - rows.start) / ROWS
        calls = OrderedCalls(comm)
        with calls.tracing():
            part: Any = [None if array is None else array[rows] for array in (y, pred, mask, weights)]
            value, gradient = gradients(loss, *part, denominators=Denominators(calls, scale))
        return scale * value, scale * gradient  # what the exchange makes of it

    ranks = run_ring(3, one)
    assert sum(value for value, _ in ranks) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(np.concatenate([gradient for _, gradient in ranks]), gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_each_rank_may_pad_to_a_length_of_its_own(reduction: str) -> None:
    import keras

    from lockstep.training.steps.losses import Denominators
    from lockstep.training.steps.ordered import OrderedCalls

    rng = np.random.default_rng(1)
    y, pred, mask = rng.integers(0, 4, (ROWS, 5)), rng.standard_normal((ROWS, 5, 4)), rng.random((ROWS, 5)) < 0.7
    mask[:3, 3:] = False  # rank 0 has three words a row, rank 1 five
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    value, _ = gradients(loss, y, pred, mask, None)

    def one(comm: Communicator) -> float:
        rows, scale = ((slice(3, 12), slice(0, 5)), 0.75) if comm.rank else ((slice(0, 3), slice(0, 3)), 0.25)
        calls = OrderedCalls(comm)
        with calls.tracing():
            part: Any = [*(array[rows] for array in (y, pred, mask)), None]
            return scale * gradients(loss, *part, denominators=Denominators(calls, scale))[0]

    assert sum(run_ring(2, one)) == pytest.approx(value, rel=1e-12)


def test_masked_and_weighted_words_of_a_recurrent_model() -> None:
    """A hundred steps: five rounds of twenty batches, since a round costs Keras more than a step."""
    import keras

    def make() -> Any:
        layers = [
            keras.layers.Embedding(7, 3, mask_zero=True),
            keras.layers.SimpleRNN(4, return_sequences=True, unroll=True),
            keras.layers.Dense(6, "softmax"),
        ]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.3, momentum=0.9), loss)
        return model

    x = sequences()[:, :2]
    y, weights = np.maximum(x - 1, 0), weights_of("some", (ROWS, 2))
    shares = (slice(0, 3), slice(3, 12))
    x[shares[0]] = 0  # a rank whose rows are all padding
    data = [np.tile(np.asarray(part), (20, 1)) for part in (x, y, weights)]
    plain = alone(make, *data, steps=5, batches=20)
    assert_as_one(plain, on_ranks(make, *data, shares=shares, steps=5, batches=20))


def test_several_outputs_each_with_its_own_denominator() -> None:
    """Own reductions, loss weights, an L2 of weights and one of activities, values that the labels mask."""
    import keras

    def make() -> Any:
        layers = keras.layers
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(inputs)
        outputs = {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(3, "softmax", name="b")(hidden)}
        model = keras.Model(inputs, outputs)
        losses = {
            "a": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "b": keras.losses.SparseCategoricalCrossentropy(ignore_class=2),
        }
        model.compile(keras.optimizers.Adam(0.05), losses, loss_weights={"a": 0.3, "b": 2.0})
        return model

    rng = np.random.default_rng(8)
    x, y = rng.standard_normal((ROWS, 4)), {"a": rng.standard_normal((ROWS, 1)), "b": rng.integers(0, 3, ROWS)}
    weights = {"a": rng.random(ROWS), "b": rng.random(ROWS)}
    shares = (slice(0, 3), slice(3, 12))
    plain, ranks = alone(make, x, y, weights, steps=10), on_ranks(make, x, y, weights, shares=shares, steps=10)
    assert_as_one(plain, ranks)
    # Each output's own loss, as a metric, is over all rows too.
    of_ranks = [
        np.array(model.history.history["b_loss"]) * (s.stop - s.start) for model, s in zip(ranks, shares, strict=True)
    ]
    np.testing.assert_allclose(np.sum(of_ranks, axis=0) / ROWS, plain.history.history["b_loss"], rtol=1e-9)


def calls_in(loss: Any, *, weighted: bool, masked: bool, micro_batches: int = 1) -> int:
    """Collectives in a traced step of one rank of two."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.losses import Denominators
    from lockstep.training.steps.ordered import OrderedCalls

    class Two:
        num_ranks = 2
        on_host: Any = None

    Two.on_host = Two
    calls = OrderedCalls(Two())  # type: ignore[arg-type]  # nothing is run
    denominators = Denominators(calls, 0.5, micro_batches)

    def step() -> Any:
        with calls.tracing():
            y_pred = tf.ones((2, 3)) * 0.5
            if masked:
                keras.src.backend.set_keras_mask(y_pred, tf.constant([True, False]))
            return denominators._global(loss, tf.zeros((2, 3)), y_pred, tf.ones((2,)) if weighted else None)

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    return sum(op.type == "PyFunc" for op in graph.get_operations())


@pytest.mark.parametrize(
    ("reduction", "weighted", "masked", "expected"),
    [
        ("sum_over_batch_size", False, False, 0),
        ("sum_over_batch_size", True, False, 0),  # Keras divides by rows there, not by weights
        ("mean", False, True, 1),
        ("mean_with_sample_weight", False, False, 0),
        ("mean_with_sample_weight", True, False, 1),
        ("mean_with_sample_weight", False, True, 1),
        ("sum", True, True, 0),
    ],
)
def test_a_plain_mean_costs_nothing(reduction: str, weighted: bool, masked: bool, expected: int) -> None:
    import keras

    loss = keras.losses.MeanAbsoluteError(reduction=reduction)
    assert calls_in(loss, weighted=weighted, masked=masked) == expected


def test_a_loop_of_ones_own_builds_its_loss_as_it_goes() -> None:
    """The first loss is a global one already, and nothing of it stays."""
    import keras

    from lockstep.training.steps.losses import Denominators
    from lockstep.training.steps.ordered import OrderedCalls

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    y_pred, y = np.ones((4, 1)), np.zeros((4, 1))
    for _ in range(2):
        with Denominators(OrderedCalls(SoloCommunicator()), 0.25).of(model):
            assert float(model.compute_loss(y=y, y_pred=y_pred)) == 16.0
        assert float(model.compute_loss(y=y, y_pred=y_pred)) == 4.0


def test_what_cannot_be_split_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    import keras
    from keras.src.losses.losses import LossFunctionWrapper  # what compile() makes of a function

    from lockstep.training.steps.losses import Denominators
    from lockstep.training.steps.ordered import OrderedCalls

    def one_number(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_true - y_pred))

    class Own(keras.losses.Loss):
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return one_number(y_true, y_pred)

    with pytest.raises(ConfigError, match="the loss dice cannot be split"):
        calls_in(keras.losses.Dice(), weighted=False, masked=False)
    wrapped = LossFunctionWrapper(one_number, name="one_number")
    for loss in (wrapped, Own(name="one_number")):
        caplog.clear()
        assert calls_in(loss, weighted=False, masked=False) == 0
        assert "one_number returns one number" in caplog.text
        for options in ({"weighted": True, "masked": False}, {"weighted": False, "masked": True}):
            with pytest.raises(ConfigError, match="with a mask or sample weights"):
                calls_in(loss, **options)
    with pytest.raises(ConfigError, match="cannot be split into micro-batches"):
        calls_in(keras.losses.MeanAbsoluteError(), weighted=False, masked=True, micro_batches=2)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs) for _ in range(2)])
    model.compile("sgd", [keras.losses.MeanSquaredError(reduction="none"), "mse"])
    model.train_on_batch(np.ones((4, 2)), [np.ones((4, 1))] * 2)
    refused = pytest.raises(ConfigError, match="is not the only loss")
    with refused, Denominators(OrderedCalls(SoloCommunicator()), 0.5).of(model):
        raise AssertionError("was not refused")
