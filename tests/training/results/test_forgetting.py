"""What a chain of runs has forgotten: by NumPy, and on real runs by plain Keras, pandas and scikit-learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import roc_auc_score

from lockstep.features.sample_id import sample_id
from lockstep.storage.errors import CorruptionError
from lockstep.training.config import TrainConfig
from lockstep.training.results.evaluate import summary
from lockstep.training.results.forgetting import Forgetting, forgetting_of, forgotten_in
from lockstep.training.results.report import write_report
from tests.builders.evaluations import evaluate, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import TABLE_SCHEMA, write_rows

DAYS, ROWS = 3, {"train": 140, "test": 60}


def matrix_of(values: np.ndarray, metric: str = "accuracy") -> Forgetting:
    """The lower triangle of `values` (days, days); NaN is missing."""
    rows = [[None if np.isnan(value) else float(value) for value in row[: i + 1]] for i, row in enumerate(values)]
    days = tuple(f"/data/day{number}" for number in range(len(values)))
    return Forgetting(metric=metric, days=days, runs=days, values=tuple(map(tuple, rows)))


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("days", [2, 3, 7])
def test_the_figures_are_those_of_numpy(metric: str, days: int) -> None:
    sign = -1 if metric == "loss" else 1
    for seed in range(20):
        values = np.random.default_rng(seed).random((days, days))
        found, last = matrix_of(values, metric), values[-1]
        assert found.average == pytest.approx((np.mean(last), days))
        changes = sign * (last[:-1] - np.diag(values)[:-1])
        assert found.backward_transfer == pytest.approx((changes.mean(), days - 1))
        known = np.where(np.tri(days, dtype=bool), sign * values, -np.inf)[:-1, :-1]
        assert found.forgetting == pytest.approx(((known.max(axis=0) - sign * last[:-1]).mean(), days - 1))
        assert found.missing == 0 and Forgetting.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_what_is_missing_is_no_number() -> None:
    values = np.array([[0.9, 0, 0, 0], [np.nan, 0.8, 0, 0], [0.7, np.nan, np.nan, 0], [0.5, 0.75, np.nan, 0.6]])
    found = matrix_of(values)
    assert found.average == pytest.approx(((0.5 + 0.75 + 0.6) / 3, 3))
    assert found.forgetting == pytest.approx((((0.9 - 0.5) + (0.8 - 0.75)) / 2, 2))
    assert found.backward_transfer == pytest.approx((((0.5 - 0.9) + (0.75 - 0.8)) / 2, 2))
    assert found.missing == 4
    assert found.table()[2] == ["day1", "not evaluated", "0.8000", "", ""]
    assert "over 2 of 3 days" in found.words() and "at least this" in found.words()
    nothing = matrix_of(np.full((2, 2), np.nan))
    assert (nothing.average, nothing.forgetting, nothing.backward_transfer) == ((None, 0),) * 3
    assert "average accuracy not evaluated" in nothing.words()


def write_days(folder: Path) -> list[str]:
    """Days that continue one another; the direction that says yes turns by a third of a half circle each day."""
    urls: list[str] = []
    parent: Any = None
    for day in range(DAYS):
        total = sum(ROWS.values())
        a, b = np.random.default_rng(day).standard_normal((2, total)).astype(np.float32)
        ids = [sample_id([f"{day} {row}".encode()], 0) for row in range(total)]
        label = np.cos(day * np.pi / 3) * a + np.sin(day * np.pi / 3) * b > 0
        rows = pa.RecordBatch.from_arrays(
            [pa.array(ids, pa.int64()), pa.array(a), pa.array(b), pa.array(label)], schema=TABLE_SCHEMA.arrow_schema()
        )
        urls.append(str(folder / f"day{day}"))
        made = write_rows(urls[-1], TABLE_SCHEMA, rows, ROWS, "parquet", 2, 8, 0, parent=parent)
        parent = (urls[-1], made)
    return urls


def auc_by_keras(run_url: str, dataset: str) -> float:
    """The exported model on the test rows that pandas reads."""
    import keras

    (model,) = Path(run_url).glob("models/*/model.keras")
    rows = pd.concat(map(pd.read_parquet, sorted(Path(dataset).glob("split=test/*.parquet"))))
    x = {name: rows[name].to_numpy(np.float32)[:, None] for name in ("a", "b")}
    return float(roc_auc_score(rows["label"], keras.models.load_model(model).predict(x, verbose=0)[:, 0]))


@pytest.mark.slow
def test_a_chain_of_runs_is_a_matrix_of_what_keras_predicts(tmp_path: Path) -> None:
    """The last run begins from what was published; the second day's evaluation is missing first."""
    days, models = write_days(tmp_path), str(tmp_path / "models")
    runs = [str(tmp_path / f"run{day}") for day in range(DAYS)]

    def learn(day: int, source: str | None) -> None:
        config = TrainConfig(
            datasets=(days[day],), run=runs[day], model="logistic", num_ranks=1, global_batch=16, epochs=10,
            learning_rate=0.1, launcher="local", init_from=source,
        )  # fmt: skip
        run(config)

    learn(0, None)
    first = evaluate(runs[0], days[0], "test", run_threads, earlier=True)
    assert first["forgetting"] is None and forgetting_of(runs[0], "test") is None
    learn(1, runs[0])
    assert publish(runs[1], models, days[1], "test", "auc:max", run_threads)["published"]
    stored = list(Path(runs[1]).glob("evaluations/days-test/*.json"))
    assert len(stored) == 1, "a publication evaluates each day too"
    stored[0].unlink()
    learn(2, models)
    Path(models).rename(tmp_path / "gone")  # run.json has whose weights were published there

    expected = np.array([[auc_by_keras(one, day) for day in days] for one in runs])
    part = evaluate(runs[2], days[2], "test", run_threads, earlier=True)
    assert [list(map(bool, row)) for row in part["forgetting"]["values"]] == [[True], [False] * 2, [True] * 3]
    assert "not evaluated" in Path(write_report(runs[2])).read_text() and "at least this" in summary(part)

    assert evaluate(runs[1], days[1], "test", run_threads, earlier=True)["forgetting"]["runs"] == tuple(runs[:2])
    found = forgetting_of(runs[2], "test")
    assert found is not None and found.metric == "auc" and found.days == tuple(days)
    for row, values in enumerate(found.values):
        np.testing.assert_allclose(np.array(values, float), expected[row, : row + 1], rtol=1e-6)
    best = expected[:2, :2].max(axis=0, where=np.tri(2, dtype=bool), initial=0.0)
    lost = float(np.mean(best - expected[2, :2]))
    assert found.forgetting[0] == pytest.approx(lost, rel=1e-5) and lost > 0.2, "the chain forgets"
    assert f"forgetting {found.forgetting[0]:.4f}" in Path(write_report(runs[2])).read_text()
    assert forgotten_in(runs[2]).keys() == {"test"}

    (damaged,) = Path(runs[0]).glob("evaluations/days-test/*.json")
    damaged.write_bytes(damaged.read_bytes().replace(b"day0", b"day9"))
    with pytest.raises(CorruptionError, match="days-test"):
        forgetting_of(runs[2], "test")
