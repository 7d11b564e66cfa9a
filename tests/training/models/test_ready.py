"""The ready models: what each computes, that N ranks train them as one does, and that plain Keras loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.encode.encoder import Encoder
from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions, build
from lockstep.training.models.ready import READY
from tests.builders.evaluations import evaluate
from tests.training._threads import final_tensors, run, run_threads
from tests.training._tiny import write_rows

pytestmark = pytest.mark.slow
IDS = {"kind": "hash", "buckets": 9, "seed": 42, "output": "index"}
PAGES = {"kind": "sequence", "length": 5, "with": "nothing", "of": {"kind": "hash", "buckets": 9, "seed": 42}}
LABELS = {
    "yes_no": Field(name="y", dtype="bool", kind="label"),
    "number": Field(name="y", dtype="float32", kind="label"),
    "classes": Field(name="y", dtype="int64", kind="label", num_classes=12),
}
MODELS = {  # and the label that each is trained on below
    "linear": "number",
    "logistic": "yes_no",
    "mlp": "classes",
    "wide-deep": "yes_no",
    "two-tower": "number",
    "gru": "classes",
    "transformer": "classes",
}


def schema_of(label: str) -> Schema:
    return Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="amount", dtype="float32"),
            Field(name="item", dtype="int64", encoding=IDS),
            Field(name="pages", dtype="string", shape=(None,), encoding=PAGES),
            Field(name="user", dtype="int64", encoding=IDS),
            LABELS[label],
        )
    )


def write_visits(root: Path, label: str) -> str:
    """96 training and 24 test rows whose label depends on user, item and last page."""
    rng, total = np.random.default_rng(0), 120
    user, item, amount = rng.integers(0, 6, total), rng.integers(0, 6, total), rng.random(total, np.float32)
    pages = [[f"/{page}" for page in rng.integers(0, 6, rng.integers(0, 7))] for _ in range(total)]
    number = user - item + amount + [len(one) for one in pages]
    values = {"yes_no": number > 3, "number": number.astype(np.float32), "classes": (user + item) % 12}
    ids = pa.array([sample_id([str(row).encode()], 0) for row in range(total)], type=pa.int64())
    schema = schema_of(label)
    columns = [ids, pa.array(amount), pa.array(item), pa.array(pages), pa.array(user), pa.array(values[label])]
    rows = pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, schema.arrow_schema(), strict=True)],
        schema=schema.arrow_schema(),
    )
    write_rows(str(root), schema, rows, {"train": 96, "test": 24}, "tfrecord", 2, 8, 0)
    return str(root)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_learns_alike_on_one_and_two_ranks_and_loads_as_plain_keras(model: str, tmp_path: Path) -> None:
    data, runs = write_visits(tmp_path / "data", MODELS[model]), []
    small = {"width": 8, "dropout": 0.0, "embedding": 4, "decay": 1e-3}
    known = {name: value for name, value in small.items() if name in READY[model].settings}
    for num_ranks in (1, 2):
        config = TrainConfig(
            datasets=(data,), run=str(tmp_path / f"run{num_ranks}"), model=model, num_ranks=num_ranks,
            global_batch=24, lanes=8, batchnorm="local", epochs=4, learning_rate=0.02, precision="float64",
            launcher="local", extra=known,
        )  # fmt: skip
        runs.append((config.run, run(config).metrics["loss"]))
    one, two = (final_tensors(url) for url, _ in runs)
    for name in one:
        if name.startswith("weights"):
            np.testing.assert_allclose(two[name], one[name], rtol=1e-7, atol=1e-10, err_msg=name)
    if model == "two-tower":
        found = evaluate(runs[1][0], data, "test", run_threads)
        metrics = found["metrics"]
        assert found["samples"] == 24 and found["class_counts"] is None
        assert metrics["rmse"] ** 2 == pytest.approx(metrics["loss_without_regularisation"], rel=1e-6)
    import keras

    (file,) = Path(runs[0][0], "models").glob("*/model.keras")
    loaded = keras.models.load_model(file)
    assert {type(layer).__module__.split(".")[0] for layer in loaded.layers} == {"keras"}


def signature_of(label: str) -> Signature:
    return Encoder(schema_of(label), {}).signature


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {variable.path: np.asarray(variable) for variable in model.weights}


def test_two_tower_is_the_product_of_two_vectors_and_three_biases() -> None:
    model = build("two-tower", signature_of("number"), ModelOptions(extra={"embedding": 3})).model
    rng = np.random.default_rng(1)
    for variable in model.weights:
        variable.assign(rng.standard_normal(variable.shape))
    found = weights_of(model)
    items, users = np.array([1, 0, 9]), np.array([2, 5, 0])
    x = {"amount": np.ones((3, 1)), "item": items[:, None], "user": users[:, None], "pages": np.ones((3, 5), int)}
    wanted = []
    for item, user in zip(items, users, strict=True):
        of_item, of_user = (
            (found[f"_{name}_bias/embeddings"][i, 0], found[f"_{name}_vector/embeddings"][i]) if i else (0, np.zeros(3))
            for name, i in (("item", item), ("user", user))
        )
        wanted.append(found["_bias/embeddings"][0, 0] + of_item[0] + of_user[0] + of_item[1] @ of_user[1])
    np.testing.assert_allclose(np.asarray(model(x))[:, 0], wanted, rtol=1e-5)


@pytest.mark.parametrize("model", ["gru", "transformer"])
def test_padding_of_a_sequence_changes_nothing(model: str) -> None:
    """The same pages in a longer column give the same output, and another order another one."""
    specs = {n: TensorSpec(shape=(n,), dtype="int64", ids=9) for n in (3, 6)}
    outputs = []
    for length, spec in specs.items():
        signature = Signature(features={"p": spec}, label=TensorSpec(shape=(), dtype="int64"), num_classes=12)
        built = build(model, signature, ModelOptions(extra={"width": 4})).model
        rng = np.random.default_rng(2)
        for variable in built.weights:
            values = 0.5 * rng.standard_normal((9, 16) if "_places" in variable.path else variable.shape)
            variable.assign(values[: variable.shape[0], : variable.shape[1]] if "_places" in variable.path else values)
        rows = np.zeros((3, length), int)
        rows[0, :3], rows[1, :3] = (1, 2, 3), (2, 1, 3)
        outputs.append(np.asarray(built({"p": rows})))
        assert [metric.name for metric in built._compile_metrics._user_metrics] == ["accuracy", "hit@10"]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    assert abs(outputs[0][0] - outputs[0][1]).max() > 1e-3 and np.isfinite(outputs[0]).all()


def test_linear_finds_the_least_squares() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 3 + 0.1 * rng.standard_normal(200)).astype(np.float32)
    signature = Signature(
        features={"x": TensorSpec(shape=(3,), dtype="float32")},
        label=TensorSpec(shape=(), dtype="float32"),
        num_classes=None,
        label_is_number=True,
    )
    model = build("linear", signature, ModelOptions(learning_rate=0.05)).model
    for _ in range(200):
        model.train_on_batch({"x": x}, y)
    wanted = np.linalg.lstsq(np.c_[x, np.ones(200)], y, rcond=None)[0]
    found = np.concatenate([np.asarray(weight).ravel() for weight in model.weights])
    np.testing.assert_allclose(found, wanted, atol=0.02)


def test_mlp_scales_pixels() -> None:
    image = TensorSpec(shape=(2, 2, 1), dtype="uint8")
    signature = Signature(features={"image": image}, label=TensorSpec(shape=(), dtype="int64"), num_classes=3)
    model = build("mlp", signature, ModelOptions(extra={"layers": 1})).model
    x = np.array([[[[255], [0]], [[51], [255]]]], np.uint8)
    dense = next(layer for layer in model.layers if layer.name == "_dense0")
    import keras

    hidden = keras.Model(model.inputs[0], dense.output)(x)
    wanted = np.maximum(np.array([[1, 0, 0.2, 1]]) @ np.asarray(dense.kernel), 0)
    np.testing.assert_allclose(hidden, wanted, atol=1e-6)


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_resnets_have_the_papers_parameters(depth: int, millions: float) -> None:
    """He et al., table 6, which cuts the digits off; the shortcuts' convolutions (option B) are 2,560 more."""
    image = TensorSpec(shape=(32, 32, 3), dtype="uint8")
    signature = Signature(features={"image": image}, label=TensorSpec(shape=(), dtype="int64"), num_classes=10)
    count = build(f"resnet{depth}", signature, ModelOptions()).model.count_params() - 2560
    assert f"{count / 1e6:.6f}".startswith(str(millions))


@pytest.mark.parametrize(
    ("model", "label", "extra", "words"),
    [
        ("linear", "yes_no", {}, "a number (a float32"),
        ("two-tower", "classes", {}, "yes or no (a bool)"),
        ("wide-deep", "classes", {}, "yes or no (a bool)"),
        ("two-tower", "number", {"user": "amount"}, "user=amount"),
        ("two-tower", "number", {"user": "item", "item": "item"}, "user=item"),
        ("gru", "classes", {"sequence": "page"}, "ids: pages"),
        ("transformer", "classes", {"sequence": "user"}, "ids: pages"),
    ],
)
def test_what_a_model_cannot_use_is_refused_by_name(model: str, label: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(model, signature_of(label), ModelOptions(extra=extra))
    assert words in str(caught.value)


def test_pairs_are_a_row_of_the_last_id_alone() -> None:
    import keras

    from lockstep.training.models.inputs import pairs_of

    ids = np.array([[3, 2, 0], [1, 2, 0], [2, 1, 3], [0, 0, 0]])
    given = keras.Input((3,), dtype="int64")
    model = keras.Model(given, pairs_of(given, 4, 2))
    assert not model.predict(ids, verbose=0).any()
    (table,) = model.weights
    table.assign(np.arange(8).reshape(4, 2))
    assert model.predict(ids, verbose=0).tolist() == [[4, 5], [4, 5], [6, 7], [0, 1]]
