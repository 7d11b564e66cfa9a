"""A run's model is published if it is better than the published one, on the rows of all days."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.training.config import TrainConfig
from lockstep.training.results.evaluate import summary
from lockstep.training.run.weights_source import located
from tests.builders.evaluations import evaluate, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import TABLE_SCHEMA, write_rows, write_table

pytestmark = pytest.mark.slow


def trained(folder: Path, name: str, epochs: int, **options: Any) -> str:
    config = TrainConfig(
        datasets=(str(folder / "data"),), run=str(folder / name), model="logistic", num_ranks=1, global_batch=16,
        epochs=epochs, launcher="local", **options,
    )  # fmt: skip
    run(config)
    return config.run


def test_the_better_of_two_models_on_the_same_rows_stays_published(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    models, data = str(tmp_path / "models" / "clicks"), str(tmp_path / "data")
    worse = trained(tmp_path, "worse", 1)
    better = trained(tmp_path, "better", 6)
    where = Path(models, "_current.json")

    def tried(one: str, metric: str = "loss:min") -> dict[str, Any]:
        return publish(one, models, data, "test", metric, run_threads)

    first = tried(worse)
    assert first["published"] and first["reason"] == "no model was published" and first["samples"] == 30
    assert first["value"] == evaluate(worse, data, "test", run_threads)["metrics"]["loss"]
    assert located(models) == first["model"]

    text = where.read_bytes()
    assert tried(worse) == first and where.read_bytes() == text  # a second try publishes nothing

    second = tried(better)
    assert second["published"] and second["value"] < second["replaces"]["value"] == first["value"]
    text = where.read_bytes()
    assert json.loads(text)["run"] == better

    refused = tried(worse)
    assert not refused["published"] and "not better" in refused["reason"] and where.read_bytes() == text
    (note,) = Path(models, "_refused").iterdir()
    assert json.loads(note.read_bytes())["kept"]["run"] == better

    warm = trained(tmp_path, "warm", 1, init_from=models)  # the next day's run begins from the published weights
    of_warm, of_worse = (evaluate(one, data, "test", run_threads)["metrics"]["loss"] for one in (warm, worse))
    assert of_warm < of_worse

    shutil.move(better, f"{better}-gone")
    third = tried(worse)
    assert third["published"] and f"{better} is not there any more" in third["reason"]

    with pytest.raises(ConfigError, match="nothing_such"):
        tried(warm, "nothing_such:max")
    with pytest.raises(NotFoundError):
        tried(str(tmp_path / "missing"))


def write_days(folder: Path) -> list[str]:
    """Two days of which the second continues the first: in the first `a` says yes, in the second it says no."""
    days: list[str] = []
    parent = None
    for day in range(2):
        rng = np.random.default_rng(day)
        a, b = rng.standard_normal((2, 200)).astype(np.float32)
        ids = [sample_id([f"{day} {row}".encode()], 0) for row in range(200)]
        columns = [pa.array(ids, pa.int64()), pa.array(a), pa.array(b), pa.array(a + 0.5 * b > 0 if not day else a < 0)]
        rows = pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA.arrow_schema())
        url, records = str(folder / f"day{day}"), {"train": 140, "test": 60}
        parent = (url, write_rows(url, TABLE_SCHEMA, rows, records, "tfrecord", 2, 8, 0, parent=parent))
        days.append(url)
    return days


def test_a_model_that_forgot_an_earlier_day_is_not_published(tmp_path: Path) -> None:
    """The second model learns the second day only: better on both together, and wrong on the first."""
    days, models, runs = write_days(tmp_path), str(tmp_path / "models"), list[str]()
    accuracy: list[dict[str, float]] = []
    for name, day, epochs in (("first", 0, 1), ("second", 1, 20)):
        config = TrainConfig(
            datasets=(days[day],), run=str(tmp_path / name), model="logistic", num_ranks=2, global_batch=16,
            epochs=epochs, learning_rate=0.02, launcher="local",
        )  # fmt: skip
        run(config)
        runs.append(config.run)
    for one in runs:
        found = evaluate(one, days[1], "test", run_threads, num_ranks=2, earlier=True)
        alone = [evaluate(one, day, "test", run_threads) for day in reversed(days)]
        assert [each["dataset"] for each in found["by_dataset"]] == [days[1], days[0]]
        for each, other in zip(found["by_dataset"], alone, strict=True):
            assert each["samples"] == other["samples"] == 60
            assert each["intervals"] == other["intervals"]
            assert each["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
        assert "day0" in summary(found) and "day1" in summary(found)
        accuracy.append({Path(each["dataset"]).name: each["metrics"]["accuracy"] for each in found["by_dataset"]})

    def tried(one: str, metric: str, max_drop: float | None) -> dict[str, Any]:
        return publish(one, models, days[1], "test", metric, run_threads, max_drop=max_drop)

    drop = accuracy[0]["day0"] - accuracy[1]["day0"]
    assert drop > 0.2 and sum(accuracy[1].values()) > sum(accuracy[0].values())
    assert tried(runs[0], "accuracy:max", 0.1)["published"]
    refused = tried(runs[1], "accuracy:max", 0.1)
    assert not refused["published"] and f"better, but worse by {drop:.6g} on day0" in refused["reason"]
    assert tried(runs[1], "accuracy:max", drop + 0.01)["published"]
