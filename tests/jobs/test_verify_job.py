"""What lockstep verify prints: a bounded number of lines, whatever the number of files and faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.jobs import verify as job
from lockstep.storage.verify import Finding

FILES, FAULTS = 3_000, 500


@pytest.fixture
def week(monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with many files below two folders, and damaged ones."""

    def verify(url: str, *, on_ok: Callable[[str, str], None], on_bytes: Callable[[int], None]) -> list[Finding]:
        on_ok("run.json", "sealed")
        for number in range(FILES):
            on_ok(f"metrics/g0001/part-{number:05d}.jsonl", "9 bytes")
            on_ok(f"logs/g0001/rank-{number % 2:05d}/part-{number // 2:05d}.log", "9 bytes")
        return [Finding(f"checkpoints/step-{number}", None, 7, "changed") for number in range(FAULTS)]

    monkeypatch.setattr("lockstep.storage.verify.verify", verify)
    monkeypatch.setattr("lockstep.storage.verify.kind_of", lambda fs, url: "run")
    monkeypatch.setattr("lockstep.storage.verify.total_bytes", lambda url: None)
    return "/week"


def test_many_files_and_faults_are_counted(week: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main([week]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 100 + 2
    assert lines[0] == "ok    6001 files"
    assert lines[-2:] == ["WRONG 400 more faults, which --all shows", f"run {week}: 500 faults found"]


def test_all_are_shown_on_request(week: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main([week, "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("ok ")]) == 1 + 2 * FILES + 1
    assert len([line for line in lines if line.startswith("WRONG ")]) == FAULTS
