"""The command line of `make cluster`, on processes that stand in for the daemons.

The README's test has the command start, use and end real ones; spark-submit on YARN is in test_jobs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.daemons import HDFS, YARN
from tests.cluster.process import Process

ROOT = Path(__file__).resolve().parents[2]

# Five real daemons take half a minute of processor time to start. What is told of them, kept, found again and ended is
# the same for any five processes.
ON_STAND_INS = """
from jobs._cli import run_job
from tests.cluster import daemons
from tests.cluster.__main__ import main

daemons.Cluster._format = lambda self: (self.folder / "logs").mkdir(parents=True, exist_ok=True)
daemons.Cluster._java = lambda self, name: ["sleep", "600"]
daemons.READY = {name: lambda cluster, name=name: cluster.running(name) for name in daemons.READY}
run_job(main)
"""


def command(action: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", ON_STAND_INS, action, "--dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_the_command_starts_tells_and_ends_just_its_five_on_stand_ins(tmp_path: Path) -> None:
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
