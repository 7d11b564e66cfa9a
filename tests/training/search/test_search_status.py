"""The status of a search: what Optuna's study has, from the journal alone, at any event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import status as job
from lockstep.storage.fs import filesystem
from lockstep.training.run.status import now_utc
from lockstep.training.search.journal import Journal
from lockstep.training.search.search_status import SHOWN_TRIALS, read_search
from lockstep.training.search.study import Study
from tests.training.search._searches import run, search


class Killed(BaseException):
    """The driver dies here."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report, and no wait for the disk: no machine fails here."""
    monkeypatch.setattr("lockstep.training.search.tune.write_search_report", lambda *of: "report")
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.mark.parametrize("at", [3, 8, 15, 22])
def test_a_killed_search_has_the_trials_of_its_study_and_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    options: dict[str, Any] = {"trials": 8, "pruner": "median", "epochs": 2, "seed": 3}
    append, left = Journal.append, at

    def dies(self: Journal, *args: Any, **more: Any) -> None:
        nonlocal left
        append(self, *args, **more)
        left -= 1
        if not left:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "append", dies)
        run(search(tmp_path, **options))
    fs, root = filesystem(str(tmp_path)), str(tmp_path)
    study = Study(search(tmp_path, **options), Journal(fs, root))
    found, best = read_search(fs, root, now_utc()), study.best_so_far()
    assert found.state == "interrupted"
    expected = [(one.number, one.parameters, one.state, one.epochs) for one in study.trials]
    assert [(one.number, one.parameters, one.state, one.epochs) for one in found.trials] == expected
    assert (found.best and found.best.number) == (best and best.number)
    assert job.main([root]) == 0
    head, table, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{root}: interrupted, {len(study.trials)} trials") and len(rows) == len(study.trials)
    assert table.split()[:4] == ["trial", "state", "epochs", "loss"]


def test_a_search_of_many_trials_is_a_page_of_lines_and_whole_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = run(search(tmp_path, trials=40, epochs=1, sampler="random"))
    assert job.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}: finished, 40 trials, 40 done, best loss {best['value']:.6g}")
    assert len(lines) == 1 + 1 + SHOWN_TRIALS + 1 and any("done (best)" in line for line in lines)
    assert lines[-1] == f"  20 more trials: lockstep runs {tmp_path}"
    assert job.main([str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["trials"]) == 40
