"""Folders in which outputs are prepared: those of killed processes of this host are removed, no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.storage.fs import filesystem
from lockstep.training.driver.ownership import staging_folder

KILLED = """
import os, signal, sys
from lockstep.storage.fs import filesystem
from lockstep.training.driver.ownership import staging_folder
for kind in ("predict", "export"):
    filesystem(sys.argv[1]).mkdirs(staging_folder(filesystem(sys.argv[1]), sys.argv[1], kind))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fs = str(tmp_path), filesystem(str(tmp_path))
    mine = Path(staging_folder(fs, folder, "predict"))
    mine.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    left = sorted(path.name.split("-")[1] for path in tmp_path.iterdir())
    assert left == ["export", "predict", "predict"]
    (tmp_path / "_staging-predict-mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another")
        staging_folder(fs, folder, "predict")
    assert len(list(tmp_path.iterdir())) == 4, "another host cannot see whether that process lives"
    assert not Path(staging_folder(fs, folder, "predict")).exists(), "a name only"
    left = sorted(path.name for path in tmp_path.iterdir() if "export" not in path.name)
    assert left == sorted([mine.name, "_staging-predict-mine"])
    assert Path(staging_folder(fs, str(tmp_path / "none"), "predict")).parent == tmp_path / "none"
