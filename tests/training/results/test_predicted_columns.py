"""Ids, further columns and class names in predictions, and the mean of runs: against the rows and plain Keras."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import lockstep
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.results.export_run import export_run
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run, run_threads
from tests.training._tiny import write_rows

pytestmark = pytest.mark.slow
NAMES = {"bool": ("<=50K", ">50K"), "int64": ("high", "low", "middle")}
RECORDS = {"train": 96, "test": 61}
BATCH = 16


def write(root: Path, dtype: str) -> pd.DataFrame:
    """Write people with an id and a town; returns the test rows."""
    n = np.arange(sum(RECORDS.values()))
    names = NAMES[dtype]
    classes = None if dtype == "bool" else len(names)
    label = Field(name="grade", dtype=dtype, kind="label", num_classes=classes, class_names=names)
    fields = (
        sample_id_field(),
        Field(name="person", dtype="string", encoding={"kind": "ignore"}),
        Field(name="town", dtype="string", nullable=True, encoding={"kind": "hash", "buckets": 8, "seed": 42}),
        Field(name="x", dtype="float32"),
        label,
    )
    schema, target = Schema(fields), n * n % len(names)
    frame = pd.DataFrame(
        {
            "sample_id": n * 7919,
            "person": [f"p-{i}" for i in n],
            "town": [None if i % 9 == 0 else f"t{i % 4}" for i in n],
            "x": (n % 10 / 10).astype(np.float32),
            "grade": target == 1 if dtype == "bool" else target,
        }
    )
    rows = pa.RecordBatch.from_pandas(frame, schema=schema.arrow_schema(), preserve_index=False)
    manifest = write_rows(str(root), schema, rows, RECORDS, "tfrecord", 2, 16, 0)
    created = {**manifest.created_by, "config": {"id_columns": ["person"]}}
    (root / "_manifest.json").write_bytes(replace(manifest, created_by=created).to_bytes())
    return frame.iloc[RECORDS["train"] :].reset_index(drop=True)


def trained(data: Path, url: Path, model: str, seed: int) -> str:
    options: dict[str, Any] = {"global_batch": 16, "epochs": 2, "num_ranks": 1, "launcher": "local"}
    run(TrainConfig(datasets=(str(data),), run=str(url), model=model, seed=seed, **options))
    return str(url)


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_ids_columns_and_names_travel_and_runs_are_averaged(dtype: str, tmp_path: Path) -> None:
    import keras

    rows, names = write(tmp_path / "data", dtype), NAMES[dtype]
    data = str(tmp_path / "data")
    models = ("logistic", "wide-deep") if dtype == "bool" else ("mlp", "mlp")
    runs = [trained(tmp_path / "data", tmp_path / f"run-{i}", name, i) for i, name in enumerate(models)]
    features = rows[["person", "town", "x"]]
    each = [lockstep.predict(one, features, batch=BATCH).astype(np.float64) for one in runs]

    predict(runs[0], data, "test", str(tmp_path / "one"), run_threads, batch=BATCH, columns=["town"])
    one = pd.read_parquet(tmp_path / "one")
    own = ["label", "prediction"] + (["class"] if dtype == "int64" else []) + ["label_name", "class_name"]
    assert list(one.columns) == ["sample_id", "person", "town", *own]
    assert one["person"].tolist() == rows["person"].tolist()
    assert [None if pd.isna(town) else town for town in one["town"]] == rows["town"].tolist()
    assert one["label_name"].tolist() == [names[int(value)] for value in rows["grade"]]
    predicted = (each[0][:, 0] > 0.5).astype(int) if dtype == "bool" else each[0].argmax(axis=1)
    assert one["class_name"].tolist() == [names[value] for value in predicted]
    for wrong, got in (("twn", "no such column"), ("prediction", "no such column")):
        with pytest.raises(ConfigError, match=f"`{wrong}` cannot be added") as caught:
            predict(runs[0], data, "test", str(tmp_path / "no"), run_threads, columns=[wrong])
        assert got in caught.value.got or "has this name" in caught.value.got

    for ranks in (1, 2):
        predict(runs, data, "test", str(tmp_path / f"mean-{ranks}"), run_threads, num_ranks=ranks, batch=BATCH)
    mean = sum(each) / 2
    found = pd.read_parquet(tmp_path / "mean-1")
    assert found.equals(pd.read_parquet(tmp_path / "mean-2")), "whatever the ranks"
    outputs = found["prediction"].to_numpy() if dtype == "bool" else np.stack(found["prediction"].tolist())
    np.testing.assert_allclose(outputs.reshape(mean.shape), mean, rtol=1e-6)

    done = export_run(runs, str(tmp_path / "model"), run_threads, form="savedmodel")
    assert verify(done.output) == [] and len(done.others) == 1
    assert json.loads((tmp_path / "model" / "signature.json").read_text())["class_names"] == list(names)
    np.testing.assert_allclose(lockstep.predict(done.output, features, batch=BATCH), mean, rtol=1e-6)
    plain = keras.models.load_model(tmp_path / "model" / "model.keras")
    assert sorted(plain.input) == ["town", "x"], "by the names of the features"

    result = evaluate(runs[0], data, "test", run_threads, batch=BATCH, slices=("grade",))
    assert result["confusion"]["classes"] == list(names)
    sizes = {part["value"]: part["samples"] for part in result["slices"]["grade"]}
    assert sizes == pd.Series([names[int(value)] for value in rows["grade"]]).value_counts().to_dict()
