"""The command line of `make cluster`; spark-submit on YARN is in test_jobs.py and the README's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.daemons import HDFS, YARN
from tests.cluster.process import Process

ROOT = Path(__file__).resolve().parents[2]


def command(action: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", action, "--dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_make_clusters_command_starts_tells_and_ends_just_its_five(tmp_path: Path) -> None:
    assert command("status", tmp_path)[0] == 1
    code, told = command("up", tmp_path)
    state = json.loads((tmp_path / "cluster.json").read_text())
    processes = [Process(**entry) for entry in state["processes"]]
    try:
        assert code == 0, told
        assert [process.name for process in processes] == [*HDFS, *YARN]
        assert all(process.alive for process in processes)
        assert f"export HADOOP_CONF_DIR={tmp_path / 'conf'}" in told and "spark-submit --master yarn" in told
        code, again = command("up", tmp_path)
        assert code == 0 and "runs already" in again
        processes[0].end()
        code, refused = command("up", tmp_path)
        assert code == 2 and "a part of the cluster" in refused and "Traceback" not in refused
    finally:
        code, told = command("down", tmp_path)
    assert code == 0 and told.count(" ended") == 4 and "was gone already" in told
    assert not any(process.alive for process in processes)
    assert command("down", tmp_path) == (0, f"No cluster runs under {tmp_path}.\n")
