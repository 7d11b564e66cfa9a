"""The loop over trials: killed at any event, with errors, several at once."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.report import main as report_job
from lockstep.storage.documents import unseal
from lockstep.storage.errors import ConfigError, DataError, NotFoundError, StorageError, TrainingFailedError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver.stop import EndedByCallerError
from lockstep.training.driver.train import Hooks
from lockstep.training.search.journal import Journal
from lockstep.training.search.study import Study
from tests.training.search._searches import journal, result_of, run, search, trainer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for the disk: no machine fails here."""
    monkeypatch.setattr("os.fsync", lambda file: None)


class Killed(BaseException):
    """The driver dies here."""


def states(root: Path, **options: Any) -> list[str]:
    study = Study(search(root, **options), Journal(filesystem(str(root)), str(root)))
    return [trial.state for trial in study.trials]


def test_a_driver_killed_at_any_event_leaves_no_trial_lost_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.training.search.tune.write_search_report", lambda *of: "report")
    options: dict[str, Any] = {"trials": 12, "pruner": "median", "sampler": "tpe", "epochs": 2, "seed": 3}
    best = run(search(tmp_path / "whole", **options))
    expected = events(tmp_path / "whole")
    append, writes = Journal.append, 0

    def dies(self: Journal, *args: Any, **more: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == at and not after:
            raise Killed
        append(self, *args, **more)
        if writes == at:
            raise Killed

    monkeypatch.setattr(Journal, "append", dies)
    assert {event["event"] for event in expected} == {"asked", "epoch", "pruned", "ended"}
    for at in range(1, len(expected) + 1, 3):
        for after in (False, True):
            root, writes = tmp_path / f"{at}-{after}", 0
            with pytest.raises(Killed):
                run(search(root, **options))
            assert run(search(root, **options))["parameters"] == best["parameters"]
            assert events(root) == expected


def events(root: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in unseal(event, "an event").items() if name != "model"} for event in journal(root)
    ]


def test_a_finished_search_trains_nothing_and_more_trials_continue_it(tmp_path: Path) -> None:
    first = run(search(tmp_path, trials=4))

    def none(config: TrainConfig, hooks: Hooks) -> Any:
        raise AssertionError(config.run)

    assert run(search(tmp_path, trials=4), none) == first
    run(search(tmp_path, trials=6))
    assert states(tmp_path) == ["done"] * 6
    document = unseal((tmp_path / "best.json").read_bytes(), "best.json")
    assert document["kind"] == "best trial" and document["flags"][0] == "--learning-rate"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>done</td>") == 5 and page.count("done, the best") == 1
    assert "<svg" in page and "PED-ANOVA" in page


def test_several_trials_run_at_once_and_never_more(tmp_path: Path) -> None:
    together = threading.Barrier(3)
    inside: set[str] = set()
    most = 0

    def meets(config: TrainConfig, hooks: Hooks) -> Any:
        nonlocal most
        inside.add(config.run)
        most = max(most, len(inside))
        together.wait(60)  # fails unless three trials are here
        inside.remove(config.run)
        return trainer(config, hooks)

    run(search(tmp_path, trials=6, parallel=3), meets)
    assert most == 3 and states(tmp_path) == ["done"] * 6


def test_a_pruned_trial_is_ended_and_its_threads_with_it(tmp_path: Path) -> None:
    ended = []

    def waits(config: TrainConfig, hooks: Hooks) -> Any:
        """As a run does that is asked every 0.2 s: it makes steps until it is ended."""
        assert config.step.learning_rate is not None
        if int(Path(config.run).name) < 10:
            return trainer(config, hooks)
        hooks.on_epoch({"kind": "epoch", "step": 1, "epoch": 0, "metrics": {"loss": 1e9}})
        wait = threading.Event()
        for _ in range(600):
            if (error := hooks.ended()) is not None:
                ended.append(config.run)
                raise error
            wait.wait(0.1)
        raise AssertionError("was not ended")

    run(search(tmp_path, trials=12, pruner="median"), waits)
    assert states(tmp_path, pruner="median") == ["done"] * 10 + ["pruned"] * 2 and len(ended) == 2


def test_a_loss_that_is_not_finite_fails_its_trial_only(tmp_path: Path) -> None:
    def diverges(config: TrainConfig, hooks: Hooks) -> Any:
        if config.run.endswith("0000"):
            raise DataError("step 3: the loss is not finite", got="nan", allowed="finite", next_step="Lower it.")
        if config.run.endswith("0001"):
            return result_of(config, {"loss": "nan"})
        return trainer(config, hooks)

    run(search(tmp_path, trials=4), diverges)
    assert states(tmp_path) == ["failed", "failed", "done", "done"]
    assert "step 3: the loss is not finite" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "at", "ends"),
    [
        (ConfigError("no such model"), 0, True),  # a mistake in the call: every trial would meet it
        (ConfigError("no such model"), 2, False),
        (TrainingFailedError("rank 0 was killed"), 2, False),
        (StorageError("no NameNode"), 2, True),
        (ZeroDivisionError("a bug"), 2, True),
    ],
)
def test_what_ends_the_search_and_what_only_a_trial(tmp_path: Path, error: Exception, at: int, ends: bool) -> None:
    def fails(config: TrainConfig, hooks: Hooks) -> Any:
        if config.run.endswith(f"{at:04d}"):
            raise error
        return trainer(config, hooks)

    if ends:
        with pytest.raises(type(error)):
            run(search(tmp_path, trials=4), fails)
        assert states(tmp_path)[at] == "open"
        run(search(tmp_path, trials=4))  # the same call, after the cause is removed
        assert states(tmp_path) == ["done"] * 4
    else:
        run(search(tmp_path, trials=4), fails)
        assert states(tmp_path) == ["done", "done", "failed", "done"]


def test_an_unknown_metric_ends_the_search_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(search(tmp_path, metric="los:min"))
    assert "--metric los:min" in caught.value.got and "loss:min, loss:max" in caught.value.allowed
    with pytest.raises(ConfigError, match="val_auc:max without --validate"):
        search(tmp_path, metric="val_auc:max")


def test_epochs_without_a_validation_are_not_judged(tmp_path: Path) -> None:
    def validates(config: TrainConfig, hooks: Hooks) -> Any:
        """After the second epoch and the last."""
        for epoch in range(4):
            more = {"val_loss": 1.0 / (epoch + 1)} if epoch % 2 else {}
            hooks.on_epoch({"kind": "epoch", "step": epoch + 1, "epoch": epoch, "metrics": {"loss": 9.0, **more}})
        return result_of(config, {"loss": 9.0})  # as of a run that ended in the middle of an epoch

    options: dict[str, Any] = {"metric": "val_loss:min", "validate": "test", "pruner": "median"}
    assert run(search(tmp_path, trials=2, **options), validates)["value"] == 0.25
    judged = [(event["trial"], event["epochs"]) for event in events(tmp_path) if event["event"] == "epoch"]
    assert judged == [(0, 2), (1, 2)]


def test_an_error_ends_the_other_trials_in_order(tmp_path: Path) -> None:
    other_runs, ended = threading.Event(), []

    def one_fails(config: TrainConfig, hooks: Hooks) -> Any:
        if config.run.endswith("0001"):
            assert other_runs.wait(60)
            raise StorageError("no NameNode")
        other_runs.set()
        wait = threading.Event()
        while (error := hooks.ended()) is None:
            wait.wait(0.05)
        ended.append(error)
        raise error

    with pytest.raises(StorageError):
        run(search(tmp_path, parallel=2), one_fails)
    assert len(ended) == 1 and isinstance(ended[0], EndedByCallerError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trial-")]


def test_the_page_of_a_search_is_copied_without_its_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(search(tmp_path / "search", trials=3))
    own, copy = tmp_path / "search" / "report.html", tmp_path / "page.html"
    assert report_job([str(tmp_path / "search")]) == report_job([str(tmp_path / "search"), "--html", str(copy)]) == 0
    assert capsys.readouterr().out == f"report {own}\nreport {copy}\n"
    links = re.compile(r'<a href="trials/000[012]">([^<]+)</a>')
    assert len(links.findall(own.read_text())) == 4
    assert copy.read_text() == links.sub(r"\1", own.read_text()) and "<a " not in copy.read_text()
    own.unlink()
    with pytest.raises(NotFoundError, match="has no report yet") as caught:
        report_job([str(tmp_path / "search"), "--html", str(copy)])
    assert caught.value.got and caught.value.allowed and "lockstep status" in caught.value.next_step
