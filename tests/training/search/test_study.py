"""A search's study: the same trials as Optuna proposes without us, and rebuilt from the journal after any kill."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from lockstep.jobs import _train
from lockstep.jobs.tune import config_of
from lockstep.jobs.tune import parser as parser_of_tune
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, TrainingFailedError
from lockstep.storage.fs import filesystem
from lockstep.training.run.lineage import SupersededError
from lockstep.training.search.config import check_search, open_search
from lockstep.training.search.journal import Journal
from lockstep.training.search.report import render
from lockstep.training.search.study import DONE, Study
from tests.training.search._searches import SPACE, journal, loss_of, run, search

SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
PRUNERS: dict[str, Callable[[], Any]] = {
    "none": optuna.pruners.NopPruner,
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=10),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=4),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report, and no wait for the disk: no machine fails here."""
    monkeypatch.setattr("lockstep.training.search.tune.write_search_report", lambda *of: "report")
    monkeypatch.setattr("os.fsync", lambda file: None)


def study_of(root: Path, **options: Any) -> Study:
    return Study(search(root, **options), Journal(filesystem(str(root)), str(root)))


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_trials_are_those_of_optuna_with_the_same_seed(tmp_path: Path, sampler: str, pruner: str) -> None:
    def objective(trial: optuna.Trial) -> float:
        parameters = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.0, log=True),
            "global_batch": trial.suggest_categorical("global_batch", [8, 16]),
        }
        for epochs in range(1, 4):
            trial.report(loss_of(parameters, epochs), epochs)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss_of(parameters, 4)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    theirs = optuna.create_study(study_name="lockstep", sampler=SAMPLERS[sampler](seed=7), pruner=PRUNERS[pruner]())
    theirs.optimize(objective, n_trials=20)
    config = search(tmp_path, trials=20, seed=7, sampler=sampler, pruner=pruner)
    best = run(config)
    ours = study_of(tmp_path, trials=20, seed=7, sampler=sampler, pruner=pruner).trials
    assert [trial.parameters for trial in ours] == [trial.params for trial in theirs.trials]
    assert [trial.state == DONE for trial in ours] == [trial.state.name == "COMPLETE" for trial in theirs.trials]
    assert (best["trial"], best["value"]) == (theirs.best_trial.number, theirs.best_value)
    assert len({trial.state for trial in ours}) == (1 if pruner == "none" else 2)


def test_a_grid_has_each_point_once(tmp_path: Path) -> None:
    space = {"learning_rate": {"choices": [0.01, 0.1, 1.0]}, "global_batch": {"low": 8, "high": 16, "step": 8}}
    config = search(tmp_path, space, sampler="grid", trials=None)
    best = run(config)
    study = Study(config, Journal(filesystem(str(tmp_path)), str(tmp_path)))
    points = {(trial.parameters["learning_rate"], trial.parameters["global_batch"]) for trial in study.trials}
    assert len(study.trials) == len(points) == 6 and best["parameters"]["learning_rate"] == 0.1
    with pytest.raises(ConfigError, match="1 to 6"):
        search(tmp_path, space, sampler="grid", trials=7)


def test_a_value_that_is_no_number_is_a_failed_trial_as_for_optuna(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    first, second = study.ask(), study.ask()
    study.end(first, float("nan"))
    with pytest.raises(TrainingFailedError, match="its metric is nan"):
        study.best()
    study.end(second, 1.0, model="/before/it/was/moved/trials/0001/models/g0002")
    again = study_of(tmp_path)
    assert [trial.state for trial in again.trials] == ["failed", "done"]
    assert again.best().number == 1 and again.importances() == {}
    assert again.best().model == f"{search(tmp_path).run_of(1)}/models/g0002", "where the search is now"


def test_the_page_marks_the_best_links_trials_and_says_how_to_continue(tmp_path: Path) -> None:
    space = {"learning_rate": {"low": 1e-3, "high": 1.0, "log": True}, "set.name": {"choices": ["$x$<b>", "b"]}}
    config = search(tmp_path / "tune", space, trials=4)
    run(config)
    study = Study(config, Journal(filesystem(str(tmp_path)), config.root))
    best = study.best()
    page = render(config, study.trials, best, {})
    assert f"best: trial {best.number}" in page and page.count("<strong>done, the best</strong>") == 1
    assert [f'<a href="trials/{trial:04d}">' in page for trial in range(4)] == [True] * 4
    assert "<b>" not in page and "<script" not in page and 'class="card whole"' in page
    trained, more = (html.unescape(text) for text in re.findall("<pre><code>(.*?)</code></pre>", page, re.DOTALL))
    flags = _train.config_of(_train.parser("", "train").parse(shlex.split(trained)[2:]))
    assert (flags.step.learning_rate, flags.data.epochs) == (best.parameters["learning_rate"], 8)
    assert flags.run == f"{config.root}-best" and flags.model.extra == {"name": best.parameters["set.name"]}
    declared, call = more.removeprefix("cat > space.toml <<'EOF'\n").split("\nEOF\n")
    (tmp_path / "space.toml").write_text(declared)
    again = config_of(parser_of_tune().parse(shlex.split(call.replace("space.toml", f"{tmp_path}/space.toml"))[2:]))
    assert again == replace(config, trials=8), "the same search, with more trials"


def test_a_changed_or_missing_event_is_named(tmp_path: Path) -> None:
    run(search(tmp_path, trials=3))
    event = tmp_path / "journal" / "000003.json"
    whole = event.read_bytes()
    event.write_bytes(whole.replace(b"asked", b"AsKED"))
    with pytest.raises(CorruptionError, match="000003") as changed:
        study_of(tmp_path)
    event.unlink()
    with pytest.raises(CorruptionError, match=r"000003\.json") as missing:
        study_of(tmp_path)
    for caught in (changed, missing):
        parts = caught.value.got, caught.value.allowed, caught.value.next_step
        assert all(parts) and "begin another search" in parts[2]
    event.write_bytes(whole)
    with pytest.raises(DataError, match="does not repeat: asked of trial 0"):
        study_of(tmp_path, seed=1)


def test_two_drivers_cannot_write_one_journal(tmp_path: Path) -> None:
    fs = filesystem(str(tmp_path))
    one, other = Journal(fs, str(tmp_path)), Journal(fs, str(tmp_path))
    assert one.read() == other.read() == []
    one.append("asked", 0, parameters={"x": 1})
    other.append("asked", 0, parameters={"x": 1})  # the same event: as after a lost answer to a rename
    one.append("ended", 0, value=1.0)
    with pytest.raises(SupersededError, match="another driver has written"):
        other.append("ended", 0, value=2.0)
    assert len(journal(tmp_path)) == 2


def test_only_the_same_search_is_resumed(tmp_path: Path) -> None:
    fs, config = filesystem(str(tmp_path)), search(tmp_path / "tune")
    assert not check_search(fs, config, "5")
    open_search(fs, config, "5")
    assert check_search(fs, search(tmp_path / "tune", trials=20, parallel=3), "5")
    for other, named in (
        (search(tmp_path / "tune", metric="loss:max"), "metric"),
        (search(tmp_path / "tune", {**SPACE, "global_batch": {"choices": [8, 32]}}), "space"),
        (search(tmp_path / "tune", seed=1), "base.seed = 1 (not 0)"),
        (search(tmp_path / "tune", sampler="random"), "sampler"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_search(fs, other, "5")
        assert named in caught.value.got
    with pytest.raises(ConfigError, match="Optuna 4"):
        check_search(fs, config, "4")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(ConfigError, match="exists and is not a search"):
        check_search(fs, search(tmp_path / "run"), "5")
    with pytest.raises(ConfigError, match="is not a directory"):
        check_search(fs, search(tmp_path / "run" / "run.json"), "5")
