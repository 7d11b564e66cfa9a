"""Searches with real ranks: killed and resumed on this host with Keras, and side by side in one Spark session."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.random_kills import fingerprint
from lockstep.process.installed import ROOT
from lockstep.storage.documents import unseal
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.train import Hooks
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.results.evaluate import summary
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.space import space_of
from lockstep.training.search.tune import tune
from tests.builders.evaluations import evaluate
from tests.training._ranks import HERE, rank_path
from tests.training._threads import run_threads
from tests.training._tiny import write_table
from tests.training.search._searches import journal
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
LOCAL = ("--launcher", "local")
QUICK = Hooks(lease_watch_s=0.1)
TRIALS = 12


def all_events(root: Path) -> list[dict[str, Any]]:
    """The journal without the URLs of models, which are below `root`."""
    found = [unseal(event, "an event") for event in journal(root)]
    return [{name: value for name, value in event.items() if name != "model"} for event in found]


def events(root: Path, kind: str) -> list[int]:
    """The trials of the events of one kind."""
    return [event["trial"] for event in all_events(root) if event["event"] == kind]


def have_ended(root: Path, trials: int) -> bool:
    """Whether so many trials of the search have ended."""
    return root.is_dir() and len(events(root, "ended")) >= trials


class Command:
    """`lockstep tune` in a folder with a dataset and a space of learning rates."""

    def __init__(self, folder: Path, *more: str) -> None:
        write_table(folder / "data")
        (folder / "space.toml").write_text("learning_rate = {low = 1e-3, high = 1.0, log = true}\n")
        self.of_a_run = ["--dataset", "data", "--model", "logistic", "--num-ranks", "1", "--global-batch", "16"]
        self.of_a_run += ["--epochs", "2", "--seed", "3", "--checkpoint-every", "2"]
        self.of_a_run += ["--validate", "test"]
        search = ["--space", "space.toml", "--metric", "val_auc:max", *more]
        self.words = [sys.executable, "-m", "lockstep", "tune", *self.of_a_run, *search]
        self.where: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}

    def begin(self, root: str, *launcher: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self.words, "--run", root, *launcher], **self.where)

    def finish(self, root: str, *launcher: str) -> subprocess.CompletedProcess[str]:
        words = [*self.words, "--run", root, "--json", *launcher]
        done = subprocess.run(words, **self.where, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
        return done


def test_a_killed_search_is_resumed_and_a_trial_is_the_run_that_jobs_train_makes(tmp_path: Path) -> None:
    command, root = Command(tmp_path, "--trials", "2", "--parallel", "2"), tmp_path / "tune"
    with command.begin("tune", *LOCAL) as first:
        until(lambda: list(root.glob("trials/*/checkpoints/*/_manifest.json")))
        first.send_signal(signal.SIGKILL)
    done = command.finish("tune", *LOCAL)
    assert sorted(events(root, "asked")) == sorted(events(root, "ended")) == [0, 1] and side_by_side(root)
    assert sorted(path.name for path in (root / "trials").iterdir()) == ["0000", "0001"]
    assert "resuming from checkpoint" in done.stderr and "2 of 2" in done.stderr
    best = json.loads(done.stdout)
    assert Path(best["model"], "model.keras").is_file() and Path(best["report"]).is_file()
    plain = [sys.executable, "-m", "lockstep", "train", *command.of_a_run, *LOCAL, *best["flags"], "--run", "plain"]
    subprocess.run(plain, **command.where, check=True, timeout=300)
    assert fingerprint(str(tmp_path / "plain")) == fingerprint(best["run"])


def test_a_metric_that_the_model_lacks_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    base = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "tune"), model="logistic", num_ranks=1, global_batch=16,
        epochs=1, validate="test", launcher="local",
    )  # fmt: skip
    space = space_of({"learning_rate": {"low": 0.1, "high": 1.0}}, "the test")
    with pytest.raises(ConfigError, match="no metric `val_f1`") as caught:
        tune(SearchConfig(base=base, space=space, metric="val_f1:max", trials=2), run_threads, hooks=QUICK)
    assert "--metric val_f1:max" in caught.value.got and "val_auc:max" in caught.value.allowed
    assert (tmp_path / "tune/trials/0000/run.json").exists() and not list(tmp_path.glob("tune/trials/*/metrics/*/*"))


def test_the_winner_is_reported_on_rows_that_no_trial_has_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --keep-best, where a trial's value and model are those of its best checkpoint."""
    write_table(tmp_path / "data", records={"train": 96, "validation": 40, "test": 60, "more": 20})
    base = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "tune"), model="logistic", num_ranks=1, global_batch=16,
        epochs=2, validate="validation", keep_best="val_loss:max", launcher="local",
    )  # fmt: skip
    space = space_of({"learning_rate": {"choices": [0.01, 0.1]}}, "the test")
    search = partial(SearchConfig, base=base, space=space, metric="val_loss:min", sampler="grid")
    for split in ("validation", "train"):
        with pytest.raises(ConfigError, match="--test"):
            search(test=split)
    with pytest.raises(ConfigError, match="nothing to evaluate on") as caught:
        tune(search(test="none"), run_threads, hooks=QUICK)
    assert "--test none" in caught.value.got and not (tmp_path / "tune").exists()
    best = tune(search(), run_threads, hooks=QUICK)
    scored = evaluate(best["run"], str(tmp_path / "data"), "test", run_threads)
    assert best["test"] == {name: scored[name] for name in best["test"]} and best["test"]["samples"] == 60
    assert best["chosen_on"] == "validation" and scored["chosen_on"] == []
    result = _result(Path(best["run"]))
    assert (
        best["value"]
        == result["best"]["value"]
        == result["best"]["metrics"]["val_loss"]
        != result["metrics"]["val_loss"]
    )
    page = Path(best["report"]).read_text()
    assert "chosen on split validation: optimistic" in page and "on split test, which no trial has seen" in page
    judged = evaluate(best["run"], str(tmp_path / "data"), "validation", run_threads)
    rules = ["--keep-best val_loss:max", "the --metric of a search, val_loss:min"]
    assert judged["chosen_on"] == rules and f"chosen on this split ({'; '.join(rules)}): optimistic" in summary(judged)
    assert judged["metrics"]["loss"] == pytest.approx(best["value"])

    def none(*of: Any, **more: Any) -> Any:
        raise AssertionError("it starts nothing")

    assert tune(search(), none, hooks=QUICK) == best
    assert tune(search(test="more"), run_threads, hooks=QUICK)["test"]["samples"] == 20
    shutil.rmtree(tmp_path / "data")
    write_table(tmp_path / "data", records={"train": 96, "validation": 40})
    capsys.readouterr()
    again = base.but(run=str(tmp_path / "two"))
    assert tune(replace(search(), base=again), run_threads, hooks=QUICK)["test"] is None
    assert "no split is kept apart: the best value is chosen on split `validation`" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_search_killed_at_random_moments_makes_the_trials_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Four SIGKILLs under each launcher; the journal's events and the best run's bits are equal."""
    command = Command(tmp_path, "--trials", str(TRIALS), "--pruner", "median")
    whole = json.loads(command.finish("whole", *LOCAL).stdout)
    rng = random.Random(5)
    for root, launcher in (("local", LOCAL), ("barrier", ("--launcher", "barrier", "--master", "local[1]"))):
        for kill in range(4):
            with command.begin(root, *launcher) as driver:
                if kill == 0:
                    until((tmp_path / root / "trials").is_dir)
                time.sleep(rng.uniform(2.0, 14.0))
                assert driver.poll() is None, "the search had ended before it was killed"
                driver.send_signal(signal.SIGKILL)
        found = json.loads(command.finish(root, *launcher).stdout)
        assert all_events(tmp_path / root) == all_events(tmp_path / "whole")
        runs = sorted((tmp_path / root / "trials").iterdir())
        assert [run.name for run in runs] == [f"{number:04d}" for number in range(TRIALS)]
        assert any(len(list(run.glob("generations/*.json"))) > 1 for run in runs), "no trial was resumed"
        assert (found["parameters"], found["value"]) == (whole["parameters"], whole["value"])
        assert fingerprint(found["run"]) == fingerprint(whole["run"])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_kills_at_random_moments_leave_exactly_thirty_trials(tmp_path: Path) -> None:
    """Two trials at once; each kill up to two seconds after a random number of trials has ended."""
    command, root = Command(tmp_path, "--trials", "30", "--parallel", "2"), tmp_path / "tune"
    rng = random.Random(5)
    for ended in sorted(rng.sample(range(29), 10)):
        with command.begin("tune", *LOCAL) as driver:
            until(partial(have_ended, root, ended), 600)
            time.sleep(rng.uniform(0.0, 2.0))
            assert driver.poll() is None, "the search had ended before it was killed"
            driver.send_signal(signal.SIGKILL)
    best = json.loads(command.finish("tune", *LOCAL).stdout)
    numbers = list(range(30))
    assert sorted(events(root, "asked")) == sorted(events(root, "ended")) == numbers
    runs = sorted((root / "trials").iterdir())
    assert [run.name for run in runs] == [f"{number:04d}" for number in numbers]
    assert all(_result(run)["epochs"] == 2 for run in runs), "each is whole"
    resumed = [run.name for run in runs if len(list(run.glob("generations/*.json"))) > 1]
    done = [event for event in all_events(root) if event["event"] == "ended"]
    assert best["value"] == max(event["value"] for event in done) and resumed
    print(f"{len(runs)} trials, of which {len(resumed)} were killed and resumed, best {best['metric']} {best['value']}")


def test_trials_share_a_spark_session_and_pruned_ones_save_steps(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_path(monkeypatch)
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    for path in (Path(HERE, "_ranks.py"), Path(here, "_search_ranks.py")):
        spark.sparkContext.addPyFile(str(path))
    write_table(tmp_path / "data", records={"train": 100, "validation": 30})  # no split that these ranks cannot score
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,4")
    base = TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "tune"),
        model="logistic",
        num_ranks=1,
        global_batch=16,
        epochs=6,
        seed=2,
        checkpoint_every=10,
    )
    options: dict[str, Any] = {"metric": "loss:min", "trials": 4, "sampler": "random", "pruner": "hyperband"}
    space = space_of({"learning_rate": {"low": 0.1, "high": 1.0}}, "the test")
    hooks = Hooks(entry="_search_ranks:train", limits=Limits(grace_s=1.0, silent_s=60.0))
    slots = spark.sparkContext.defaultParallelism
    with pytest.raises(ConfigError, match="Lower --parallel"):
        tune(SearchConfig(base=base, space=space, parallel=slots + 1, **options), OnSpark(spark), hooks=hooks)
    spares = base.but(launcher="barrier", spare_executors=slots // 2)
    with pytest.raises(ConfigError, match="Lower --parallel"):  # a trial's spares would take the slots of others' ranks
        tune(SearchConfig(base=spares, space=space, parallel=2, **options), OnSpark(spark), hooks=hooks)
    assert not (tmp_path / "tune").exists()
    monkeypatch.setattr("lockstep.training.search.tune.split_apart", lambda config: None)  # these ranks export no model
    best = tune(SearchConfig(base=base, space=space, parallel=2, **options), OnSpark(spark), hooks=hooks)
    root = tmp_path / "tune"
    pruned = events(root, "pruned")
    assert sorted(events(root, "ended") + pruned) == list(range(4)) and pruned
    assert best["value"] == pytest.approx(best["parameters"]["learning_rate"] / 6)
    assert side_by_side(root) and sorted(_result(root / f"trials/000{n}")["metrics"]["gpu"] for n in (0, 1)) == [
        "2",
        "4",
    ]
    steps = [_last_step(root / f"trials/000{number}") for number in pruned]
    assert all(1 <= step < 37 for step in steps), steps


def side_by_side(root: Path) -> bool:
    """Whether the first two trials were both begun before one of them had ended."""
    begun = [json.loads((root / f"trials/000{n}/run.json").read_text())["created_at"] for n in (0, 1)]
    return bool(max(begun) < min(_result(root / f"trials/000{n}")["finished_at"] for n in (0, 1)))


def _result(run: Path) -> dict[str, Any]:
    found = find_result(filesystem(str(run)), RunPaths(str(run)))
    assert found is not None
    return found


def _last_step(run: Path) -> int:
    rows = [json.loads(line) for part in run.glob("metrics/*/part-*") for line in part.read_text().splitlines()]
    return max(row["step"] for row in rows)
