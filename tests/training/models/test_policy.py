"""A policy that learns from logged decisions: plain Keras' weights, at one to three ranks, and what it earns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions, build
from tests.training._fit_ranks import UNEVEN, alone, assert_as_one, fresh, on_ranks, precision

pytestmark = pytest.mark.slow
ACTIONS, PLACES = 4, 3
EXTRA: dict[str, Any] = {
    "reward": "reward", "propensity": "propensity", "dropout": 0.0, "layers": 1, "width": 8, "embedding": 3,
    "decay": 1e-3,
}  # fmt: skip
SHARES = ((slice(0, 5), slice(5, 12)), UNEVEN)


def signature(**more: Any) -> Signature:
    number = TensorSpec(shape=(1,), dtype="float32")
    features = {
        "age": number,
        "place": TensorSpec(shape=(1,), dtype="int64", ids=PLACES),
        "propensity": number,
        "reward": number,
    }
    label = TensorSpec(shape=(), dtype="int64")
    return Signature(features=features, label=label, num_classes=ACTIONS, label_is_number=False, **more)


def decisions(rows: int, seed: int = 3) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Decisions of a policy that likes small numbers; the reward is 1 for the action that the row's place has."""
    rng = np.random.default_rng(seed)
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    actions = rng.choice(ACTIONS, rows, p=shares)
    place = rng.integers(1, PLACES, rows)
    x = {
        "age": rng.normal(size=(rows, 1)).astype("float32"),
        "place": place[:, None],
        "propensity": shares[actions][:, None].astype("float32"),
        "reward": (actions == place + 1).astype("float32")[:, None],
    }
    return x, actions


def ready(loss: str) -> Any:
    return build("policy", signature(), ModelOptions(learning_rate=0.05, extra={**EXTRA, "loss": loss})).model


def by_hand(loss: str, x: dict[str, np.ndarray]) -> Any:
    """The same policy as a user of plain Keras writes it, who knows all rows of the only batch."""
    import keras
    from keras import ops

    start = {variable.path: variable.numpy() for variable in ready(loss).weights}
    inputs = {name: keras.Input((1,), dtype="int64" if name == "place" else "float32", name=name) for name in x}
    penalty = keras.regularizers.L2(1e-3)
    table = keras.layers.Embedding(PLACES, 3, embeddings_regularizer=penalty, name="table")
    hidden = keras.layers.Dense(8, "relu", kernel_regularizer=penalty, name="hidden")
    found = keras.layers.Concatenate()([ops.cast(inputs["age"], "float64"), table(inputs["place"])[:, 0]])
    output = keras.layers.Dense(ACTIONS, "softmax", name="classes")(hidden(found))
    propensity, reward = (x[name][:, 0].astype("float64") for name in ("propensity", "reward"))

    def of_rows(actions: Any, shares: Any) -> Any:
        taken = ops.sum(
            ops.one_hot(ops.cast(ops.reshape(actions, (-1,)), "int32"), ACTIONS, dtype="float64") * shares, 1
        )
        weight = taken / propensity
        earned = weight * reward
        return -(earned if loss == "ips" else earned / ops.mean(weight))

    model = keras.Model(inputs, output)
    table.set_weights([next(value for path, value in start.items() if path.endswith("embeddings"))])
    hidden.set_weights([start["_dense0/kernel"], start["_dense0/bias"]])
    model.get_layer("classes").set_weights([start["classes/kernel"], start["classes/bias"]])
    model.compile(keras.optimizers.Adam(0.05), of_rows)
    return model


@pytest.mark.parametrize("loss", ["ips", "snips"])
def test_ranks_learn_what_plain_keras_does(loss: str) -> None:
    with precision("float64"):
        x, y = decisions(12)
        x["reward"] = np.random.default_rng(5).normal(size=(12, 1)).astype("float32")
        plain = alone(lambda: by_hand(loss, x), x, y, steps=4)
        for shares in SHARES:
            ranks = on_ranks(lambda: ready(loss), x, y, shares=shares, steps=4)
            assert min(abs(one) for one in plain.losses_of_steps) > 1e-3
            assert_as_one(plain, ranks, tolerance=1e-9)


def test_a_judge_learns_alike_on_all_ranks() -> None:
    with precision("float64"):
        x, y = decisions(12)
        assert_as_one(
            alone(lambda: ready("dr"), x, y, steps=4),
            on_ranks(lambda: ready("dr"), x, y, shares=UNEVEN, steps=4),
            tolerance=1e-9,
        )


@pytest.mark.parametrize("loss", ["ips", "snips", "dr"])
def test_a_policy_finds_what_the_logged_one_seldom_did(loss: str) -> None:
    """The action that earns has 20 % and 10 % of the log; the mean reward of the log is 0.15."""
    x, y = decisions(2048)
    model = fresh(lambda: ready(loss))
    model.fit(x, y, batch_size=256, epochs=12, verbose=0)
    plain = model.deployed()
    shares = plain.predict(x, batch_size=2048, verbose=0)
    earned = shares[np.arange(len(y)), x["place"][:, 0] + 1].mean()
    assert x["reward"].mean() < 0.2 and earned > 0.9
    assert {type(layer).__module__.split(".")[0] for layer in plain.layers} == {"keras"}
    assert not [layer for layer in plain.layers if layer.name.startswith("_judge")]


def test_what_a_policy_does_not_take() -> None:
    weight = TensorSpec(shape=(), dtype="float32")
    for given, extra, words in (
        (signature(weight=weight), EXTRA, "takes no weights of rows"),
        (signature(), {**EXTRA, "reward": ""}, "no --set reward, and 3 candidates"),
        (signature(), {**EXTRA, "propensity": "reward"}, "propensity=reward"),
        (signature(), {**EXTRA, "reward": "place"}, "reward=place"),
    ):
        with pytest.raises(ConfigError) as caught:
            build("policy", given, ModelOptions(extra=extra))
        assert words in str(caught.value)
