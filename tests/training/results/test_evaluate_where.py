"""Evaluation of some samples, and by columns that no model is fed: against pandas and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.results.evaluate import summary
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run, run_threads
from tests.training._tiny import write_rows

pytestmark = pytest.mark.slow
WHERE = "region = 'north' AND hour >= 6 OR hour IS NULL"
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="region", dtype="string", encoding={"kind": "ignore"}),
        Field(name="a", dtype="float32"),
        Field(name="hour", dtype="int64", nullable=True, encoding={"kind": "ignore"}),
        Field(name="b", dtype="float32"),
        Field(name="visitor", dtype="int64", encoding={"kind": "ignore"}),
        Field(name="label", dtype="bool", kind="label"),
    )
)


def table(rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, rows)).astype(np.float32)
    hours = pd.array(rng.integers(0, 24, rows), dtype="Int64")
    hours[::9] = pd.NA
    return pd.DataFrame(
        {
            "sample_id": rng.permutation(rows), "region": rng.choice(["north", "south"], rows), "a": a, "hour": hours,
            "b": b, "visitor": rng.integers(0, 60, rows), "label": a + b + rng.standard_normal(rows) > 0,
        }
    )  # fmt: skip


@pytest.fixture(scope="module", params=["parquet", "tfrecord"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, pd.DataFrame]:
    """(run, dataset, test rows)."""
    folder, frame = tmp_path_factory.mktemp("where"), table(900)
    (batch,) = pa.Table.from_pandas(frame, schema=SCHEMA.arrow_schema(), preserve_index=False).to_batches()
    write_rows(str(folder / "data"), SCHEMA, batch, {"train": 600, "test": 300}, request.param, 2, 16, 0)
    options: dict[str, Any] = {"global_batch": 32, "epochs": 2, "launcher": "local", "num_ranks": 2}
    run(TrainConfig(datasets=(str(folder / "data"),), run=str(folder / "run"), model="logistic", **options))
    return str(folder / "run"), str(folder / "data"), frame[600:]


@pytest.mark.parametrize(("num_ranks", "batch"), [(1, 512), (3, 7)])
def test_metrics_are_those_of_the_rows_that_pandas_selects(
    trained: tuple[str, str, pd.DataFrame], num_ranks: int, batch: int
) -> None:
    url, dataset, frame = trained
    rows = frame[((frame.region == "north") & (frame.hour >= 6)).fillna(False) | frame.hour.isna()]
    assert 80 < len(rows) < 200
    found = evaluate(
        url, dataset, "test", run_threads, num_ranks=num_ranks, batch=batch,
        where="region='north' and hour >= 6 or hour is null", slices=["region"], clusters="visitor",
    )  # fmt: skip
    model = keras.models.load_model(Path(found["model"], "model.keras"))
    shares = model.predict({name: rows[[name]].to_numpy() for name in ("a", "b")}, verbose=0)[:, 0]
    label = rows.label.to_numpy()
    wanted = {
        "accuracy": accuracy_score(label, shares > 0.5), "auc": roc_auc_score(label, shares),
        "log_loss": log_loss(label, shares),
    }  # fmt: skip
    assert {name: found["metrics"][name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert (found["samples"], found["where"]) == (len(rows), WHERE)
    assert found["clusters"] == {"column": "visitor", "clusters": rows.visitor.nunique()}
    assert {one["value"]: one["samples"] for one in found["slices"]["region"]} == rows.region.value_counts().to_dict()
    assert f"{len(rows)} samples that meet {WHERE}, " in summary(found)


def test_a_condition_that_nothing_meets_or_that_does_not_fit_is_refused(trained: tuple[str, str, Any]) -> None:
    url, dataset, _ = trained
    with pytest.raises(ConfigError, match="no sample of split `test`"):
        evaluate(url, dataset, "test", run_threads, where="hour > 99")
    with pytest.raises(ConfigError, match="cannot be used"):
        evaluate(url, dataset, "test", run_threads, where="day > 9")


def test_columns_that_no_model_is_fed_travel_into_predictions(trained: tuple[str, str, Any], tmp_path: Path) -> None:
    url, dataset, frame = trained
    done = predict(url, dataset, "test", str(tmp_path / "out"), run_threads, columns=("visitor", "region"))
    found = pd.concat(map(pd.read_parquet, sorted(Path(done.output).glob("*.parquet")))).set_index("sample_id")
    wanted = frame.set_index("sample_id").loc[found.index]
    assert found.visitor.tolist() == wanted.visitor.tolist() and found.region.tolist() == wanted.region.tolist()
