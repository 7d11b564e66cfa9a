"""Columns may have any name: Keras and TensorFlow are the judges of the names that layers get of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.training.config import TrainConfig
from lockstep.training.models import ModelOptions, build
from lockstep.training.models.inputs import scope_name
from lockstep.training.results.export_run import export_run
from lockstep.training.results.predictor import ExportedModel
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run, run_threads
from tests.training._tiny import write_rows

pytestmark = pytest.mark.slow
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda x: x[0] != "_")
ODD = ("größe (home)", "a/b", "\\", "-", "c>", "a\x00b")
MODELS = {
    "linear": "number",
    "logistic": "yes_no",
    "mlp": "yes_no",
    "wide-deep": "yes_no",
    "two-tower": "number",
    "gru": "yes_no",
    "transformer": "yes_no",
}


@given(st.lists(NAMES | st.text("a-/2f", min_size=1, max_size=5), unique=True, min_size=2, max_size=9))
def test_each_column_has_a_name_of_its_own_that_tensorflow_takes(names: list[str]) -> None:
    import tensorflow as tf

    scopes = [scope_name(name) for name in names]
    assert len(set(scopes)) == len(names)
    with tf.Graph().as_default():
        for name in scopes:
            assert "/" not in name and "\0" not in name
            node = tf.constant(0, name=f"model/_{name}_vectors")
            assert node.op.name.lower().startswith(f"model/_{name}_vectors".lower())


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True))
def test_a_plain_name_stays(name: str) -> None:
    assert scope_name(name) == name


def signature_of(names: list[str], model: str) -> Signature:
    """Each name of a number, each of an id, and one sequence."""
    is_number = MODELS[model] == "number"
    features = {name: TensorSpec(shape=(1,), dtype="int64", ids=5) for name in names}
    features |= {f"{name}n": TensorSpec(shape=(1,), dtype="float32") for name in names[:3] if f"{name}n" not in names}
    features[f"{names[0]}s"] = TensorSpec(shape=(3,), dtype="int64", ids=5)
    label = TensorSpec(shape=(), dtype="float32")
    return Signature(features=features, label=label, num_classes=None, label_is_number=is_number)


def learned(signature: Signature, model: str, names: list[str], folder: Path) -> list[Any]:
    """The weights and predictions after a step, after it was saved and loaded by plain Keras."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    extra: dict[str, Any] = {"two-tower": {"user": names[0], "item": names[1]}}.get(model, {})
    extra |= {"gru": {"sequence": f"{names[0]}s"}, "transformer": {"sequence": f"{names[0]}s"}}.get(model, {})
    built = build(model, signature, ModelOptions(extra=extra)).model
    rng = np.random.default_rng(0)
    for variable in built.trainable_variables:
        variable.assign(rng.standard_normal(variable.shape))
    x = {
        name: rng.integers(0, 5, (8, *spec.shape)) if spec.ids else rng.random((8, *spec.shape), np.float32)
        for name, spec in signature.features.items()
    }
    built.train_on_batch(x, rng.integers(0, 2, 8).astype(np.float32))
    before = built.predict(x, verbose=0)
    built.save(folder / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(folder / "model.keras").predict(x, verbose=0), before)
    return [*map(np.asarray, built.weights), before]


def check_names(model: str, names: list[str], folder: Path) -> None:
    """A model learns the same whatever its columns are called."""
    plain = [f"c{number}" for number in range(len(names))]
    found = learned(signature_of(names, model), model, names, folder)
    for one, other in zip(found, learned(signature_of(plain, model), model, plain, folder), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("model", ["logistic", "wide-deep", "two-tower", "gru"])
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_a_model_learns_the_same_whatever_its_columns_are_called(model: str, tmp_path: Path) -> None:
    check_names(model, list(ODD[:2] if model == "gru" else ODD), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
@given(names=st.lists(NAMES, unique=True, min_size=2, max_size=4))
@settings(max_examples=5, deadline=None)
def test_a_model_learns_the_same_with_any_names(
    model: str, names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_names(model, names, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("model", ["logistic", "wide-deep"])
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_a_column_may_be_called_as_keras_calls_a_layer(model: str, tmp_path: Path) -> None:
    import keras

    keras.utils.clear_session()
    built = build(model, signature_of(["c0", "c1"], model), ModelOptions()).model
    names = sorted({layer.name for layer in built.layers if not layer.name.startswith(("c0", "c1", "_"))})
    assert len(names) > 3
    learned(signature_of(names, model), model, names, tmp_path)


def test_a_run_with_odd_names_is_trained_exported_evaluated_and_predicts(tmp_path: Path) -> None:
    import tensorflow as tf

    town, size, ratio = "home town", "größe", "a/b"
    ids = {"kind": "hash", "buckets": 9, "seed": 42, "output": "index"}
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name=ratio, dtype="float32"),
            Field(name=size, dtype="int64", encoding=ids),
            Field(name=town, dtype="int64", encoding=ids),
            Field(name="y", dtype="bool", kind="label"),
        )
    )
    rng, total = np.random.default_rng(0), 72
    raw: dict[str, Any] = {
        ratio: rng.random(total, np.float32),
        size: rng.integers(0, 6, total),
        town: rng.integers(0, 6, total),
    }
    sample_ids = [sample_id([str(row).encode()], 0) for row in range(total)]
    columns = [pa.array(values) for values in [sample_ids, *raw.values(), raw[size] > 3]]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())
    data, out = str(tmp_path / "data"), str(tmp_path / "run")
    write_rows(data, schema, rows, {"train": 48, "test": 24}, "tfrecord", 2, 8, 0)
    config = TrainConfig(
        datasets=(data,), run=out, model="wide-deep", num_ranks=1, global_batch=24, lanes=8, batchnorm="local",
        epochs=2, launcher="local", shard_embeddings=0, extra={"width": 4},
    )  # fmt: skip
    run(config)
    assert evaluate(out, data, "test", run_threads)["samples"] == 24
    export_run(out, str(tmp_path / "model"), run_threads, form="savedmodel")
    test = {name: values[48:] for name, values in raw.items()}
    loaded = ExportedModel.at(str(tmp_path / "model")).predictor()
    expected: Any = loaded(test)
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["raw"]
    names = dict(zip(("a_b", "gr__e", "home_town"), test.values(), strict=True))
    given = {name: tf.constant(values) for name, values in names.items()}
    np.testing.assert_allclose(signature(**given)["prediction"], expected, rtol=1e-6)
    predict(out, data, "test", str(tmp_path / "found"), run_threads)
    found = pq.read_table(tmp_path / "found").column("prediction").to_numpy()
    np.testing.assert_allclose(found, np.asarray(expected)[:, 0], rtol=1e-6)
