"""A run's model is published if it is better than the published one, on the rows of all days."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.training.config import TrainConfig
from lockstep.training.run.weights_source import located
from tests.builders.evaluations import evaluate, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import write_table

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
