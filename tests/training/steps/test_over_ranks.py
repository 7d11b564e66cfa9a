"""Losses that are no means over rows, on ranks: refused before the first step, or plain Keras' weights in float64."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.models import ModelOptions
from tests.training._fit_ranks import UNEVEN, alone, assert_as_one, fresh, on_ranks
from tests.training._ring import run_ring

pytestmark = pytest.mark.slow
ROWS = 12
SHORT = ("in-batch negatives, a value a row", "weights changed within a step")
LONG = (
    "a sum",
    "in-batch negatives, one number",
    "a balance loss",
    "gradients divided by their norm",
    "weights that a step assigns",
)
KINDS = [*SHORT, *(pytest.param(kind, marks=pytest.mark.soak) for kind in LONG)]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    from tests.training._fit_ranks import precision

    with precision("float64"):
        yield


def signature() -> Signature:
    specs = {name: TensorSpec(shape=(3,), dtype="float64") for name in "ab"}
    return Signature(features=specs, label=TensorSpec(shape=(), dtype="float64"), weight=None, num_classes=None)


def data(rows: int = ROWS, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    x = {name: rng.standard_normal((rows, 3)) for name in "ab"}
    return x, (x["a"].sum(axis=1) > 0).astype("float64")


def made(kind: str, ranks: bool, **more: Any) -> Any:
    from tests.training._coupled import MADE_FOR_RANKS

    make, extra = MADE_FOR_RANKS[kind]
    return make(signature(), ModelOptions(extra={**extra, "ranks": ranks, **more}))


def check(model: Any, x: Any, y: Any, weights: Any = None) -> None:
    """The check before the first step, by one process."""
    from lockstep.training.steps.other_optimizers import optimizers_of
    from lockstep.training.steps.row_means import Steps, check_row_means

    batch = (x, y) if weights is None else (x, y, weights)
    model._symbolic_build(data_batch=batch)
    model.optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.variables]
    check_row_means(Steps(model, model.train_step, optimizers_of(model), lambda _: nullcontext()), batch, "one")
    for variable, value in zip(model.variables, before, strict=True):
        assert np.array_equal(variable.numpy(), value), variable.path


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_made_for_ranks_is_that_of_one_on_uneven_ranks(kind: str) -> None:
    x, y = data()
    plain = alone(lambda: made(kind, False), x, y, steps=3)
    assert_as_one(plain, on_ranks(lambda: made(kind, True), x, y, shares=UNEVEN, steps=3))


def test_what_is_not_made_for_ranks_is_refused_by_name() -> None:
    x, y = data()
    for kind, words in {
        "in-batch negatives, a value a row": "the loss in_batch: it depends on which rows are together",
        "a balance loss": "add_loss of the layer balance: it depends",
        "a sum": "SumLoss.compute_loss: it is a sum over rows",
        "weights changed within a step": "before the optimizer applies gradients (Sam.train_step)",
        "gradients divided by their norm": "Sam.train_step: it depends",
        "weights that a step assigns": "centre/centre, changed by its own rows",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check(fresh(partial(made, kind, False)), x, y)
        told = str(caught.value)
        assert words in told and "the model one " in told and "on_ranks.mean" in told, told
        check(fresh(partial(made, kind, True)), x, y)


def is_refused(rows: int, factor: float, noise: bool, weighted: bool, seed: int) -> bool:
    """Whether a mean over rows with a penalty and `factor` times the square of a batch's mean is no mean over rows."""
    import keras

    def make() -> Any:
        inputs = {name: keras.Input((3,), name=name) for name in "ab"}
        h = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(keras.layers.Concatenate()(list(inputs.values())))
        if noise:
            h = keras.layers.GaussianNoise(0.3, seed=seed)(keras.layers.Dropout(0.4, seed=seed)(h))
        model = keras.Model(inputs, keras.layers.Dense(1)(h))

        def loss(y_true: Any, y_pred: Any) -> Any:
            errors = keras.ops.square(y_true - y_pred)[:, 0]
            return errors + factor * keras.ops.square(keras.ops.mean(y_pred))

        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    x, y = data(rows, seed)
    weights = 0.1 + np.random.default_rng(seed).random(rows) if weighted else None
    try:
        check(fresh(make), x, y, weights)
    except ConfigError as error:
        assert "no mean over rows" in str(error)
        return True
    return False


CASES = {
    "rows": st.integers(2, 70),
    "factor": st.sampled_from([0.0, 0.01, 1.0]),
    "noise": st.booleans(),
    "weighted": st.booleans(),
    "seed": st.integers(0, 9),
}


@settings(max_examples=4, deadline=None)
@given(**CASES)
def test_only_losses_whose_rows_see_each_other_are_refused(**case: Any) -> None:
    assert is_refused(**case) is (case["factor"] > 0)


@pytest.mark.soak
@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_only_losses_whose_rows_see_each_other_are_refused_at_length(**case: Any) -> None:
    assert is_refused(**case) is (case["factor"] > 0)


def right() -> dict[str, Any]:
    """Models that are right on any number of ranks, or whose batch statistics are a choice of the run."""
    import keras
    import tensorflow as tf
    from keras import ops

    from tests.training._coupled import gan, joined, vector

    inputs_of = lambda: joined(signature())  # noqa: E731
    layers = keras.layers

    def compiled(outputs: Any, inputs: Any, loss: Any = "mse", **more: Any) -> Any:
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), loss, **more)
        return model

    def normalised() -> Any:
        inputs, x = inputs_of()
        x = layers.BatchNormalization()(layers.Dense(8, "relu")(layers.BatchNormalization()(x)))
        return compiled(layers.Dense(1)(layers.Dropout(0.5)(x)), inputs, keras.losses.MeanSquaredError("sum"))

    def penalised() -> Any:
        inputs, x = inputs_of()
        x = layers.Dense(8, "relu", activity_regularizer="l1", kernel_regularizer="l2")(x)
        return compiled(layers.Dense(1)(x), inputs)

    class Variational(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: Any) -> Any:
            mean, spread = ops.split(x, 2, axis=-1)
            self.add_loss(ops.mean(ops.square(mean) + ops.exp(spread) - spread))
            return mean + ops.exp(spread / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds, dtype=x.dtype)

    def variational() -> Any:
        inputs, x = inputs_of()
        return compiled(layers.Dense(1)(Variational()(layers.Dense(4)(x))), inputs)

    class Stateful(keras.Model):
        """Draws by TensorFlow and NumPy, and keeps averages of its weights."""

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            noisy = {name: one + 0.1 * tf.random.normal(tf.shape(one), dtype=one.dtype) for name, one in x.items()}
            logs = super().train_step((noisy, y))
            for weight, average in zip(self.trainable_variables, self.averages, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return logs

    def stateful() -> Any:
        inputs, x = inputs_of()
        model = Stateful(inputs, layers.Dense(1)(x))
        model.averages = [keras.Variable(weight, trainable=False) for weight in model.trainable_variables]
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.1), "mse")
        return model

    class Mixed(keras.Model):
        """Mixes each row with another one of its rank."""

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            order = keras.random.shuffle(ops.arange(ops.shape(y)[0]))
            mix = lambda part: 0.7 * part + 0.3 * ops.take(part, order, axis=0)  # noqa: E731
            return super().train_step(({name: mix(one) for name, one in x.items()}, mix(ops.reshape(y, (-1, 1)))))

    def own_step() -> Any:
        inputs, x = inputs_of()
        model = Mixed(inputs, layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def masked() -> Any:
        inputs, x = inputs_of()
        steps = layers.Masking()(layers.Reshape((3, 2))(layers.ReLU()(x)))
        loss = keras.losses.MeanSquaredError()
        return compiled(
            layers.TimeDistributed(layers.Dense(1))(layers.GRU(4, return_sequences=True)(steps)), inputs, loss
        )

    def of_two() -> Any:
        inputs, x = inputs_of()
        outputs = [layers.Dense(1, name="first")(x), layers.Dense(1, name="second")(x)]
        model = keras.Model(inputs, outputs)
        model.compile("adam", ["mse", lambda y, p: ops.mean(ops.square(y - p))], loss_weights=[1.0, 0.3])
        return model

    makers: dict[str, Any] = {
        "batch normalisation, dropout, a sum by Keras": normalised,
        "penalties of activations and weights": penalised,
        "a variational layer": variational,
        "TensorFlow's draws, averages of weights": stateful,
        "mixup in a train_step": own_step,
        "masks": masked,
        "two outputs": of_two,
        "two optimizers": lambda: gan(signature(), ModelOptions()),
        "a vector among the logs": lambda: vector(signature(), ModelOptions()),
    }
    return makers


def test_models_that_are_right_are_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data(40)
    for name, make in right().items():
        labels = [y, y] if name == "two outputs" else np.stack([y] * 3, 1)[..., None] if name == "masks" else y
        with caplog.at_level(logging.WARNING):
            check(fresh(make), x, labels)
        assert "not known to be" not in caplog.text, (name, caplog.text)
        assert "cannot be repeated" not in caplog.text, (name, caplog.text)


def test_a_fit_of_ones_own_is_checked_too() -> None:
    """Before its first step; a step that gathers and does not know its ranks is refused while it is traced."""
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.steps.own_fit import rank_step

    x, y = data(24)
    kind = "in-batch negatives, a value a row"
    models = [[fresh(partial(made, kind, reaches)) for reaches in (False, True)] for _ in range(2)]

    def one(comm: Communicator) -> list[str]:
        seen = []
        for model, knows in zip(models[comm.rank], (True, False), strict=True):
            model.compile(distribute(model.optimizer, comm), model.loss, jit_compile=False)
            if knows:
                rank_step(model, comm)
            with pytest.raises(ConfigError) as caught:
                model.fit({name: value[comm.rank :: 2] for name, value in x.items()}, y[comm.rank :: 2], verbose=0)
            seen.append(caught.value.what)
        return seen

    first, second = run_ring(2, one)
    assert first == second
    assert "is no mean over rows" in first[0] and "does not know the other ranks" in first[1]


def test_a_penalty_of_activations_that_compares_rows_is_refused() -> None:
    import keras

    from tests.training._coupled import joined

    def make() -> Any:
        inputs, x = joined(signature())

        def penalty(h: Any) -> Any:
            return 0.1 * keras.ops.square(keras.ops.sum(h))

        model = keras.Model(
            inputs, keras.layers.Dense(1)(keras.layers.Dense(4, name="hidden", activity_regularizer=penalty)(x))
        )
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ConfigError, match="add_loss of the layer hidden: it depends"):
        check(fresh(make), *data(24))
