"""An upload that a rank wrote and read back, and that is gone when the driver looks: its DataNode has died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import CorruptionError, LostWriteError
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from tests.training._ranks import rank_path
from tests.training._tiny import write_table


@pytest.mark.slow
def test_an_upload_without_bytes_is_made_again_by_new_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank_path(monkeypatch)
    write_table(tmp_path / "data")
    check, left = CommitHandler._check_uploads, [True]

    def check_after_a_loss(self: CommitHandler, staged: str, files: dict[str, Any]) -> None:
        if files and "rank-00001" in max(files) and left:
            path = Path(staged, max(files))
            left.clear()
            path.write_bytes(b"")
        check(self, staged, files)

    monkeypatch.setattr(CommitHandler, "_check_uploads", check_after_a_loss)
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), model="tiny", num_ranks=2, global_batch=8,
        epochs=2, checkpoint_every=5, launcher="local",
    )  # fmt: skip
    hooks = Hooks(entry="_ranks:train", lease_watch_s=0.1, limits=Limits(grace_s=1.0, silent_s=60.0))
    result = train(config, run_local, hooks=hooks)
    assert (result.steps, result.restarts, result.generation) == (25, 1, 2) and not left
    assert verify(config.run) == []
    said = capfd.readouterr().err
    assert "rank-00001" in said and "does not read back as it was written" in said and "Traceback" not in said


@pytest.mark.parametrize("read", [b"", b"other", CorruptionError("short", file="f")])
def test_a_file_that_does_not_read_back_is_no_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bytes | CorruptionError
) -> None:
    def reads(self: LocalFileSystem, url: str) -> bytes:
        if isinstance(read, CorruptionError):
            raise read
        return read

    monkeypatch.setattr(LocalFileSystem, "read_bytes", reads)
    with pytest.raises(LostWriteError, match="does not read back"):
        write_file(LocalFileSystem(), str(tmp_path / "f"), b"right")
