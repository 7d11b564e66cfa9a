"""`jobs.verify RUN` also counts the samples of a run with an audit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs import verify
from tests.training.results.test_audit_run import TinyRun
from training.run.lineage import CheckpointRef


def test_each_sample_once_is_told_and_a_lost_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = TinyRun(tmp_path)
    run.generation(None, 2, [5, 10])
    assert verify.audit_faults(run.paths.root) == []
    assert "200 samples in 10 steps, each once; 0 left over" in capsys.readouterr().out
    run.fs.delete(run.paths.audit(1, 1, 5))
    faults = verify.audit_faults(run.paths.root)
    assert len([fault for fault in faults if ": missing" in fault]) == 50
    assert "audit: step 1: not a full global batch" in faults


def test_a_run_without_audit_or_dataset_is_whole_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = TinyRun(tmp_path / "a", audit=False)
    moved = TinyRun(tmp_path / "b")
    moved.generation(None, 1, [10])
    Path(moved.dataset).rename(tmp_path / "elsewhere")
    for run, why in ((plain, "a run without --audit"), (moved, "dataset")):
        assert verify.audit_faults(run.paths.root) == []
        told = capsys.readouterr().out
        assert told.startswith("note  audit not checked: ") and why in told


@pytest.mark.parametrize("audit", [False, True])
def test_a_run_that_has_lost_its_checkpoints_is_not_whole(tmp_path: Path, audit: bool) -> None:
    run = TinyRun(tmp_path, audit=audit)
    first = run.generation(None, 1, [4])
    run.generation(CheckpointRef(4, first), 1, [10])
    assert verify.audit_faults(run.paths.root) == []
    for directory in Path(run.paths.checkpoints).iterdir():
        shutil.rmtree(directory)
    assert verify.main([run.paths.root]) == 1
    (fault,) = verify.audit_faults(run.paths.root)
    assert "no checkpoint of" in fault and "none, though the newest claim or result shows that there were some" in fault


def test_an_audit_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.generation(None, 1, [10])
    path = Path(run.paths.audit(1, 0, 10))
    path.write_bytes(path.read_bytes() + b"1,0,not a sample\n")
    (fault,) = verify.audit_faults(run.paths.root)
    assert str(path) in fault
