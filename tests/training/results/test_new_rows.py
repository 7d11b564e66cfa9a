"""New rows, whose answers are not known yet, are fed to a model as it was trained: against pandas and plain Keras."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

import lockstep
from lockstep.etl import tables
from lockstep.etl.logs import job as logs
from lockstep.jobs import etl_logs, etl_table
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from tests.builders.evaluations import predict
from tests.training._threads import run, run_threads

pytestmark = pytest.mark.slow
SCHEMA = """
[[fields]]
name = "town"
dtype = "string"
nullable = true
encoding = {kind = "vocabulary", max_size = 4}

[[fields]]
name = "age"
dtype = "float64"
nullable = true
encoding = {kind = "standardise"}

[[fields]]
name = "visits"
dtype = "int64"
encoding = {kind = "standardise"}

[[fields]]
name = "plan"
dtype = "int64"
nullable = true
encoding = {kind = "vocabulary", oov_buckets = 0}

[[fields]]
name = "person"
dtype = "string"
encoding = {kind = "ignore"}

[[fields]]
name = "bought"
dtype = "bool"
kind = "label"
class_names = ["stays", "leaves"]
"""
TOWNS = ("Ulm", "Bonn", "Köln", "Kiel", "Jena", "Hof")


def people(rows: int, seed: int, *, new: bool) -> pd.DataFrame:
    """Rows with nulls; the `new` ones with towns and plans that training has not seen, and with other means."""
    rng = np.random.default_rng(seed)
    towns: list[str | None] = [*TOWNS, "Atlantis", "Vineta", None] if new else [*TOWNS, None]
    age = rng.normal(61 if new else 38, 9, rows)
    age[::7] = np.nan
    plans = pd.array(rng.integers(0, 9 if new else 4, rows), dtype="Int64")
    plans[::5] = pd.NA
    frame = pd.DataFrame(
        {
            "town": rng.choice(np.array(towns, object), rows), "age": age,
            "visits": rng.integers(9 if new else 0, 24 if new else 20, rows), "plan": plans,
            "person": [f"{'new' if new else 'old'}-{n}" for n in range(rows)],
        }
    )  # fmt: skip
    frame["bought"] = (frame["visits"] + rng.normal(0, 4, rows) > frame["visits"].mean()).to_numpy()
    return frame


def by_hand(rows: pd.DataFrame, fitted: Path) -> dict[str, Any]:
    """The inputs of a model by the files in `fitted`, by pandas alone."""
    found: dict[str, Any] = {}
    for name in ("age", "visits"):
        moments = json.loads((fitted / f"{name}.json").read_text())
        values = (rows[name].astype(float) - moments["mean"]) / moments["variance"] ** 0.5
        found[name] = values.fillna(0).to_numpy(np.float32)[:, None]
    for name, unknown in (("town", 1), ("plan", 0)):
        tokens = json.loads((fitted / f"{name}.json").read_text())["tokens"]
        texts = rows[name].astype("string")
        columns = [(texts == token).to_numpy(bool, na_value=False) for token in tokens]
        columns += [(texts.notna() & ~texts.isin(tokens)).to_numpy(bool)] * unknown
        found[name] = np.stack(columns, axis=1).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def trained(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(run, its dataset)."""
    folder = tmp_path_factory.mktemp("new-rows")
    (folder / "people.toml").write_text(SCHEMA)
    frame = people(400, 1, new=False)
    lockstep.write_dataset(frame, folder / "data", schema=lockstep.load_schema(SCHEMA), id_columns="person")
    config = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / "run"), model="logistic", global_batch=16, epochs=3,
        num_ranks=1, launcher="local", learning_rate=0.3,
    )  # fmt: skip
    return run(config).run, folder / "data"


def by_keras(trained: tuple[str, Path], rows: pd.DataFrame) -> pd.Series:
    """What plain Keras predicts for rows that pandas encodes, by person."""
    url, data = trained
    (model,) = Path(url, "models").glob("*/model.keras")
    outputs = keras.models.load_model(model).predict(by_hand(rows, data / "_fitted"), verbose=0)
    return pd.Series(outputs[:, 0].astype(float), index=rows["person"]).sort_index()


def predicted(trained: tuple[str, Path], dataset: Path, split: str = "test") -> pd.DataFrame:
    output = dataset.with_name(f"{dataset.name}-predictions")
    predict(trained[0], str(dataset), split, str(output), run_threads, batch=32)
    return pd.read_parquet(output).set_index("person").sort_index()


def of_frame(rows: pd.DataFrame, out: Path, fmt: Any) -> str:
    lockstep.write_dataset(
        rows.drop(columns="bought"), out, schema=lockstep.load_schema(SCHEMA), id_columns="person", fmt=fmt,
        unlabelled=True,
    )  # fmt: skip
    return "test"


def of_types(rows: pd.DataFrame, out: Path, fmt: Any) -> str:
    """Without a schema, by the columns' own types."""
    lockstep.write_dataset(rows.drop(columns="bought"), out, id_columns="person", fmt=fmt, unlabelled=True)
    return "test"


def of_table(rows: pd.DataFrame, out: Path, fmt: str) -> str:
    rows.drop(columns="bought").to_parquet(out.with_suffix(".parquet"))
    out.with_suffix(".toml").write_text(SCHEMA)
    flags = ["--input", f"{out}.parquet", "--schema", f"{out}.toml", "--id-columns", "person", "--format", fmt]
    config = etl_table.config_of(etl_table.parser().parse([*flags, "--unlabelled", "--output", str(out)]))
    tables.run(SparkSession.active(), config)
    return "test"


def of_log(rows: pd.DataFrame, out: Path, fmt: str) -> str:
    rows.drop(columns="bought").to_csv(out.with_suffix(".csv"), index=False)
    out.with_suffix(".toml").write_text(SCHEMA)
    flags = ["--log-format", "csv", "--input", f"{out}.csv", "--schema", f"{out}.toml", "--id-columns", "person"]
    flags += ["--format", fmt, "--unlabelled", "--output", str(out)]
    logs.run(SparkSession.active(), etl_logs.config_of(etl_logs.parser().parse(flags)))
    return "test"


def of_own_statistics(rows: pd.DataFrame, out: Path, fmt: Any) -> str:
    """With labels, and a vocabulary and means of its own."""
    lockstep.write_dataset(rows, out, schema=lockstep.load_schema(SCHEMA), id_columns="person", fmt=fmt)
    return "train"


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
@pytest.mark.parametrize("made", [of_frame, of_types, of_table, of_log, of_own_statistics])
def test_predictions_are_those_of_rows_encoded_as_in_training(
    trained: tuple[str, Path], tmp_path: Path, made: Callable[[pd.DataFrame, Path, Any], str], fmt: str
) -> None:
    rows = people(150, 2, new=True)
    rows = rows[[*reversed(rows.columns)]]
    split = made(rows, tmp_path / "new", fmt)
    assert verify(str(tmp_path / "new")) == []
    found, expected = predicted(trained, tmp_path / "new", split), by_keras(trained, rows)
    assert len(found) == len(rows) or split == "train"
    expected = expected.loc[found.index]
    np.testing.assert_allclose(found["prediction"], expected, rtol=0, atol=1e-6)
    names = np.where(expected > 0.5, "leaves", "stays")
    assert found["class_name"].tolist() == names.tolist() and set(names) == {"leaves", "stays"}
    assert ("label" in found) == (made is of_own_statistics)
    manifest = lockstep.read_manifest(tmp_path / "new")
    if made is not of_own_statistics:
        assert list(manifest.splits) == ["test"] and not any(name.startswith("_fitted") for name in manifest.files)
        assert manifest.created_by["config"]["unlabelled"] is True and manifest.created_by["config"]["split"] == "none"


def test_what_no_model_could_be_fed_is_refused(trained: tuple[str, Path], tmp_path: Path) -> None:
    rows = people(40, 3, new=True).drop(columns="bought")
    cases: list[tuple[pd.DataFrame, str]] = [
        (rows.drop(columns=["town", "visits"]), "no column `town`; no column `visits`"),
        (rows.assign(age=rows["visits"]), "column `age` of int64 (not float64)"),
        (rows.assign(bought=np.arange(40) % 3), "label `bought` of int64 (not `bought` of bool)"),
    ]
    for number, (frame, got) in enumerate(cases):
        out = tmp_path / str(number)
        if "bought" in frame:
            lockstep.write_dataset(frame, out, id_columns="person", label="bought")
        else:
            lockstep.write_dataset(frame, out, id_columns="person", unlabelled=True)
        with pytest.raises(ConfigError, match="does not store what the model is fed") as caught:
            predicted(trained, out)
        assert caught.value.got == got and "docs/prediction.md" in caught.value.next_step
    renamed = SCHEMA.replace('"stays", "leaves"', '"leaves", "stays"')
    labelled = people(40, 3, new=True)
    lockstep.write_dataset(labelled, tmp_path / "named", schema=lockstep.load_schema(renamed), id_columns="person")
    with pytest.raises(ConfigError, match="does not store") as caught:
        predicted(trained, tmp_path / "named")
    assert caught.value.got == "classes leaves, stays (not stays, leaves)"
    for fmt in ("tfrecord", "parquet"):
        missing = rows.assign(visits=pd.array([None, *range(39)], dtype="Int64"))
        lockstep.write_dataset(missing, tmp_path / f"null-{fmt}", id_columns="person", unlabelled=True, fmt=fmt)
        with pytest.raises(DataError, match="`visits` is null"):
            predicted(trained, tmp_path / f"null-{fmt}")


def test_a_missing_label_names_the_flag_and_baked_rows_are_compared(trained: tuple[str, Path], tmp_path: Path) -> None:
    rows, schema = people(90, 4, new=True), lockstep.load_schema(SCHEMA)
    with pytest.raises(ConfigError, match="`bought`") as caught:
        lockstep.write_dataset(rows.drop(columns="bought"), tmp_path / "no", schema=schema, id_columns="person")
    assert "--unlabelled" in caught.value.next_step
    rows.drop(columns="bought").to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "people.toml").write_text(SCHEMA)
    flags = ["--log-format", "csv", "--input", f"{tmp_path}/rows.csv", "--schema", f"{tmp_path}/people.toml"]
    with pytest.raises(ConfigError, match="does not have the columns") as caught:
        logs.check(etl_logs.config_of(etl_logs.parser().parse([*flags, "--output", str(tmp_path / "no")])))
    assert "--unlabelled" in caught.value.next_step
    lockstep.write_dataset(rows, tmp_path / "baked", schema=schema, id_columns="person", bake=True)
    with pytest.raises(ConfigError, match="another set of fitted files"):
        predicted(trained, tmp_path / "baked")


def test_models_of_different_statistics_are_not_averaged(
    trained: tuple[str, Path], spark: SparkSession, tmp_path: Path
) -> None:
    schema = lockstep.load_schema(SCHEMA)
    lockstep.write_dataset(people(200, 5, new=True), tmp_path / "data", schema=schema, id_columns="person")
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "num_ranks": 1, "launcher": "local"}
    other = run(TrainConfig(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="logistic", **options))
    with pytest.raises(ConfigError, match="cannot be averaged"):
        predict([trained[0], other.run], str(trained[1]), "test", str(tmp_path / "out"), run_threads)


def test_a_fold_is_encoded_by_the_statistics_of_its_training(spark: SparkSession, tmp_path: Path) -> None:
    """A run on all folds but one has that one's fitted files; new rows get these."""
    schema = lockstep.load_schema(SCHEMA)
    lockstep.write_dataset(
        people(300, 6, new=False), tmp_path / "data", schema=schema, id_columns="person", split="kfold:3"
    )
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="logistic", split="fold-0,fold-2",
        global_batch=16, epochs=1, num_ranks=1, launcher="local",
    )  # fmt: skip
    result, rows = run(config), people(60, 7, new=True)
    fitted = tmp_path / "fitted"
    fitted.mkdir()
    for name in ("age", "visits", "town", "plan"):
        (fitted / f"{name}.json").write_bytes((tmp_path / "data" / "_fitted" / f"{name}.fold-1.json").read_bytes())
    of_frame(rows, tmp_path / "new", "parquet")
    found = predicted((result.run, tmp_path / "data"), tmp_path / "new")
    (model,) = Path(result.run, "models").glob("*/model.keras")
    expected = keras.models.load_model(model).predict(by_hand(rows, fitted), verbose=0)[:, 0]
    wanted = pd.Series(expected, index=rows["person"]).sort_index()
    np.testing.assert_allclose(found["prediction"], wanted, rtol=0, atol=1e-6)
