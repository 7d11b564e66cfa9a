"""A run that was copied or moved is itself, also where another run has taken its old place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.storage.documents import seal
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.results.export_run import export_run
from lockstep.training.results.predictor import ExportedModel
from lockstep.training.results.report import write_report
from lockstep.training.results.trained_run import TrainedRun
from lockstep.training.run.moved import manifest_digest, where_now
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.published import OtherModelError
from lockstep.training.run.run_json import begun_from, read_run
from lockstep.training.run.weights_source import located
from tests.builders.evaluations import evaluate, predict, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import write_table


def config_at(folder: Path, where: str, **options: Any) -> TrainConfig:
    given = {"model": "logistic", "num_ranks": 1, "global_batch": 16, "epochs": 2, "launcher": "local", **options}
    return TrainConfig(datasets=(str(folder / "data"),), run=where, **given)


def model_bytes(run_folder: str | Path) -> bytes:
    (file,) = Path(str(run_folder).removeprefix("file://")).glob("models/*/model.keras")
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copied_run_is_itself_where_another_took_its_place(tmp_path: Path, scheme: str) -> None:
    write_table(tmp_path / "data")
    data, old, new = str(tmp_path / "data"), str(tmp_path / "nightly"), f"{scheme}{tmp_path}/archive"
    run(config_at(tmp_path, old))
    before = evaluate(old, data, "test", run_threads)["metrics"]
    shutil.copytree(old, tmp_path / "archive")
    shutil.rmtree(old)
    run(config_at(tmp_path, old, seed=7, epochs=9, learning_rate=0.1))
    assert model_bytes(old) != model_bytes(new) and evaluate(old, data, "test", run_threads)["metrics"] != before

    again = run(config_at(tmp_path, new))
    assert (again.run, again.model) == (new, f"{new}/models/g0001") and str(again.model) in again.summary()
    trained = TrainedRun.of(again, run_threads)
    found = trained.evaluate()
    assert found["metrics"] == before and found["model"] == again.model
    page = filesystem(new).read_bytes(write_report(new)).decode()
    assert "archive/models/g0001" in page and f"{old}/models" not in page
    assert ExportedModel.at(new).url == located(new) == again.model
    export_run(new, str(tmp_path / "exported"), launch=run_threads)
    assert model_bytes(new) != b"" and (tmp_path / "exported" / "model.keras").exists()
    assert evaluate(new, data, "test", run_threads, checkpoint="last")["metrics"] == pytest.approx(before)
    predict(new, data, "test", str(tmp_path / "predicted"), run_threads)
    rows = pq.read_table(tmp_path / "predicted").num_rows
    assert rows == found["samples"] == 30
    stored = json.loads((tmp_path / "predicted" / "_manifest.json").read_bytes())
    assert new in json.dumps(stored) and old not in json.dumps(stored)
    first = publish(new, str(tmp_path / "models"), data, "test", "loss:min", run_threads)
    assert first["published"] and (first["run"], first["model"]) == (new, again.model)


@pytest.mark.slow
def test_a_published_model_moves_with_its_runs_and_is_not_taken_for_another(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    work, models = tmp_path / "work", "models/clicks"
    run(config_at(tmp_path, str(work / "day1")))
    publish(str(work / "day1"), str(work / models), str(tmp_path / "data"), "test", "loss:min", run_threads)
    run(config_at(tmp_path, str(work / "day2"), init_from=str(work / models)))
    shutil.copytree(work, tmp_path / "copy")
    shutil.rmtree(work / "day1")
    run(config_at(tmp_path, str(work / "day1"), seed=7, epochs=9, learning_rate=0.1))

    copied = str(tmp_path / "copy" / "day1")
    assert located(str(tmp_path / "copy" / models)) == f"{copied}/models/g0001"
    day2 = str(tmp_path / "copy" / "day2")
    assert begun_from(read_run(filesystem(day2), RunPaths(day2))) == copied
    with pytest.raises(OtherModelError, match="is another one now"):
        located(str(work / models))
    again = publish(str(work / "day2"), str(work / models), str(tmp_path / "data"), "test", "loss:min", run_threads)
    assert again["published"] and "is not there any more" in again["reason"] and "another one now" in again["reason"]


def model_at(folder: Path, text: str) -> str:
    folder.mkdir(parents=True)
    (folder / "_manifest.json").write_bytes(seal({"kind": "model", "text": text}))
    return str(folder)


def test_what_lay_in_one_folder_is_found_in_its_copy_and_nowhere_else(tmp_path: Path) -> None:
    was, now = f"{tmp_path}/old/b/run", f"{tmp_path}/new/b/run"
    first, copy = model_at(tmp_path / "old/a/m", "one"), model_at(tmp_path / "new/a/m", "one")
    digest = manifest_digest(first)
    assert where_now(first, was, now, digest) == copy
    assert where_now(first, was, f"file://{now}", digest) == f"file://{copy}"
    assert where_now(first, was, was, digest) == first
    assert where_now(first, was, f"{tmp_path}/old/b/renamed", digest) == first  # only the run was renamed
    assert where_now(first, was, now, None) == first  # an older document: the first one is still there
    other = model_at(tmp_path / "third/a/m", "two")
    assert where_now(first, was, f"{tmp_path}/third/b/run", digest) == first  # another model of the same name
    shutil.rmtree(first)
    assert where_now(first, was, f"{tmp_path}/third/b/run", None) == other
    assert where_now("/elsewhere/m", was, now, None) == "/elsewhere/m"
    assert where_now(f"hdfs://nn:9000{first}", was, now, None) == f"hdfs://nn:9000{first}"
