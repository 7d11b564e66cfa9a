"""Retrieval with the negatives of a batch: plain Keras' weights in float64 at one, two and three ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions, build
from tests.builders.evaluations import evaluate
from tests.training._fit_ranks import UNEVEN, alone, assert_as_one, on_ranks, precision
from tests.training._threads import run, run_threads

from .test_ready import write_visits

pytestmark = pytest.mark.slow
USERS, ITEMS, WIDTH, DECAY = 6, 9, 4, 1e-3
EXTRA: dict[str, Any] = {"loss": "in_batch", "user": "user", "item": "item", "embedding": WIDTH, "decay": DECAY}
SHARES = {1: (slice(0, 12),), 2: (slice(0, 5), slice(5, 12)), 3: UNEVEN}


def signature(**more: Any) -> Signature:
    ids = {name: TensorSpec(shape=(1,), dtype="int64", ids=size) for name, size in (("item", ITEMS), ("user", USERS))}
    label = TensorSpec(shape=(), dtype="float64")
    return Signature(features=ids, label=label, num_classes=None, label_is_number=True, **more)


def data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """12 rows, some of one item, one of an unknown user."""
    rng = np.random.default_rng(4)
    x = {"user": rng.integers(1, USERS, (12, 1)), "item": rng.integers(1, ITEMS, (12, 1))}
    x["user"][3] = 0
    return x, rng.random(12)


def ready() -> Any:
    return build("two-tower", signature(), ModelOptions(learning_rate=0.05, extra=EXTRA)).model


def by_hand() -> Any:
    """The same model as a user of plain Keras writes it: vectors out, and a loss of all pairs of the batch."""
    import keras
    from keras import ops

    start, inputs, towers = ready().get_weights(), {}, {}
    for name, size, table in (("user", USERS, start[0]), ("item", ITEMS, start[1])):
        inputs[name] = keras.Input((1,), dtype="int64", name=name)
        layer = keras.layers.Embedding(
            size, WIDTH, embeddings_regularizer=keras.regularizers.L2(DECAY), name=f"_{name}"
        )
        towers[name] = layer(inputs[name])[:, 0] * ops.cast(inputs[name] > 0, "float64")
        layer.set_weights([table])

    def loss(_: Any, vectors: Any) -> Any:
        scores = ops.matmul(vectors[:, :WIDTH], ops.transpose(vectors[:, WIDTH:]))
        return -ops.diagonal(scores) + ops.logsumexp(scores, axis=1)

    model = keras.Model(inputs, keras.layers.Concatenate()([towers["user"], towers["item"]]))
    model.compile(keras.optimizers.Adam(0.05), loss)
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_negatives_of_all_ranks_are_those_of_one_batch(num_ranks: int) -> None:
    with precision("float64"):
        x, y = data()
        plain = alone(by_hand, x, y, steps=4)
        assert_as_one(plain, on_ranks(ready, x, y, shares=SHARES[num_ranks], steps=4), tolerance=1e-9)


def test_a_run_is_evaluated_and_loads_as_plain_keras(tmp_path: Path) -> None:
    import keras

    folder, losses = write_visits(tmp_path / "data", "number"), []
    for num_ranks in (1, 2):
        config = TrainConfig(
            datasets=(folder,), run=str(tmp_path / f"run{num_ranks}"), model="two-tower", num_ranks=num_ranks,
            global_batch=24, lanes=8, epochs=6, learning_rate=0.05, launcher="local", extra=EXTRA,
        )  # fmt: skip
        losses.append(run(config).metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] < np.log(24)
    url = str(tmp_path / "run2")
    assert evaluate(url, folder, "test", run_threads)["samples"] == 24
    (file,) = Path(url, "models").glob("*/model.keras")
    loaded = keras.models.load_model(file)
    assert {type(layer).__module__.split(".")[0] for layer in loaded.layers} == {"keras"}
    user, item = (loaded.get_layer(f"_{name}_vector").get_weights()[0] for name in ("user", "item"))
    rows = {"user": np.array([[1], [2]]), "item": np.array([[3], [1]])}
    others = {"amount": np.zeros((2, 1), "float32"), "pages": np.zeros((2, 5), "int64")}
    wanted = np.sum(user[[1, 2]] * item[[3, 1]], axis=1)
    np.testing.assert_allclose(loaded.predict_on_batch(rows | others)[:, 0], wanted, rtol=1e-5)


def test_what_retrieval_does_not_take() -> None:
    weight = TensorSpec(shape=(), dtype="float32")
    for given, extra, words in (
        (signature(weight=weight), EXTRA, "takes no weights of rows"),
        (signature(), {"loss": "in_batch"}, "--set user="),  # which of two columns has the items decides
        (signature(), {**EXTRA, "loss": "softmax"}, "label or in_batch"),
    ):
        with pytest.raises(ConfigError) as caught:
            build("two-tower", given, ModelOptions(extra=extra))
        assert words in str(caught.value)
