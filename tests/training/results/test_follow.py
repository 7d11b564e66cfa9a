"""An evaluator next to a run: the real training job in a process, and the real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import evaluate as job
from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, NotFoundError, TrainingFailedError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.control.task import RankTask
from lockstep.training.launch.local import run_local
from lockstep.training.results.follow import followed
from lockstep.training.run.lineage import CheckpointRef
from lockstep.training.run.paths import RunPaths, checkpoint_of
from tests.builders.evaluations import evaluate, follow
from tests.training._tiny import write_table
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]


def unused(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
    """A launch that must not be needed."""
    raise AssertionError("a checkpoint is scored twice")


@pytest.mark.slow
def test_each_checkpoint_is_scored_once_while_the_run_is_killed_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, resumed = str(tmp_path / "data"), str(tmp_path / "run"), tmp_path / "resumed"
    write_table(data)
    model = "tests.training._models:waits_in_its_second_epoch"
    command = [sys.executable, "-m", "lockstep.jobs.train", "--dataset", data, "--run", run, "--model", model]
    command += ["--global-batch", "16", "--epochs", "2", "--keep-best", "loss:min", "--keep-checkpoints", "9"]
    command += ["--num-ranks", "1", "--launcher", "local"]
    shown: list[str] = []

    def start(*more: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "WAIT_FOR": str(resumed)}
        return subprocess.Popen([*command, *more], cwd=ROOT, stdout=subprocess.DEVNULL, env=env)

    drivers = [start()]

    def show(line: str) -> None:
        shown.append(line)
        if len(shown) == 1:  # the checkpoint of the first epoch is scored, the second epoch waits
            drivers[0].kill()
            resumed.touch()
            drivers.append(start("--take-over"))

    try:
        found = follow(run, data, "test", run_local, look_s=0.2, idle_s=60.0, show=show)  # no run yet
        until(lambda: drivers[1].poll() is not None)
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    assert drivers[1].returncode == 0
    assert [(one["step"], one["generation"]) for one in found] == [(6, 1), (12, 2)] and len(shown) == 2
    assert found[-1]["result"]["metrics"] == evaluate(run, data, "test", run_local)["metrics"]
    assert found[0]["result"]["metrics"] != found[-1]["result"]["metrics"]
    assert verify(run) == []
    (folder,) = Path(run, "evaluations").iterdir()
    assert follow(run, data, "test", unused, show=shown.append) == found and len(shown) == 2
    capsys.readouterr()
    job.main(["--run", run, "--dataset", data, "--follow", "--report"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"report {RunPaths(run).report(2)}\n")
    job.main(["--run", run, "--dataset", data, "--follow", "--json"])
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [6, 12]
    page = Path(RunPaths(run).report(2)).read_text()
    assert "test of data" in page and " by epoch" in page and "log_loss" in page and "Result on test" in page
    # One more is due, and retention removes its checkpoint in the middle of the evaluation.
    name = next(file.stem for file in sorted(folder.iterdir()) if checkpoint_of(file.stem) is not None)
    (folder / f"{name}.json").unlink()

    def removed(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        shutil.rmtree(task.payload["members"][0]["checkpoint"])
        raise NotFoundError("no checkpoint", got="nothing", allowed="a checkpoint", next_step="Nothing.")

    assert follow(run, data, "test", removed, show=shown.append) == found[1:]
    assert shown[2:] == [f"{name}: left out, since the run's retention has removed it"]

    def failed(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        raise LockstepError("no memory", got="none", allowed="some", next_step="Nothing.")

    with pytest.raises(LockstepError, match="no memory"):  # for another baseline nothing is scored yet
        follow(run, data, "test", failed, baseline="majority")
    # A driver that has ended without a result.
    shutil.rmtree(RunPaths(run).results)
    with pytest.raises(TrainingFailedError, match="neither a result nor a driver"):
        follow(run, data, "test", unused, look_s=0.01, idle_s=0.1)


def test_a_damaged_evaluation_says_that_it_may_be_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "test-0"
    folder.mkdir(parents=True)
    (folder / f"{CheckpointRef(6, 1)}.json").write_bytes(b'{"digest')
    with pytest.raises(CorruptionError, match=r"0006\.g0001\.json") as caught:
        followed(filesystem(str(tmp_path)), RunPaths(str(tmp_path)))
    assert caught.value.next_step.startswith("Delete this file")


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    with pytest.raises(NotFoundError):
        follow(run, str(tmp_path / "none"), "test", unused)
    write_table(tmp_path / "no-rows", records={"train": 20, "test": 0})
    for call in (follow, evaluate):
        with pytest.raises(ConfigError, match="split `test` has no rows"):
            call(run, str(tmp_path / "no-rows"), "test", unused)
    refused: list[dict[str, Any]] = [
        {"throttle_s": -1.0},
        {"start_delay_s": -1.0},
        {"start_delay_s": float("inf")},
        {"throttle_s": float("nan")},
        {"slices": ["none"]},
    ]
    for options in refused:
        with pytest.raises(ConfigError):
            follow(run, data, "test", unused, **options)
    with pytest.raises(TrainingFailedError, match="neither a result nor a driver"):
        follow(run, data, "test", unused, look_s=0.01, idle_s=0.1)
    for flags in (["--throttle", "5"], ["--start-delay", "5"]):
        with pytest.raises(ConfigError):
            job.main(["--run", run, "--dataset", data, *flags])
    for flags in (["--follow"], ["--report"]):
        with pytest.raises(ConfigError):
            job.main(["--run", run, run, "--dataset", data, *flags])
    assert not Path(run).exists()
