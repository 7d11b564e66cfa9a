"""Spark's GPU addresses end in the ranks' CUDA_VISIBLE_DEVICES: real workers and executors, GPUs that are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from lockstep.storage.errors import ConfigError
from tests.training._gpu_driver import ROOT
from tests.training._ranks import rank_path
from training import devices
from training.control.server import Handler
from training.control.task import Limits, RankTask
from training.launch.local import run_local
from training.launch.session import Launch

pytestmark = pytest.mark.slow


def spark_home(folder: Path) -> Path:
    """The installed Spark under another path: workers of a local cluster put their folders into its home."""
    assert pyspark.__file__ is not None
    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def test_each_rank_sees_the_gpu_of_its_task_and_a_lost_executor_is_replaced(tmp_path: Path) -> None:
    """A process of its own: this one's Spark session has another master."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "CUDA_"))}
    environment |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(ROOT / "tests" / "spark"),
        "SPARK_HOME": str(spark_home(tmp_path / "spark")),
        "PYSPARK_SUBMIT_ARGS": "--driver-memory 512m pyspark-shell",
    }
    command = [sys.executable, "-m", "tests.training._gpu_driver", str(tmp_path / "gpus")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert sorted(rank[devices.VISIBLE] for rank in told["seen"]) == ["3", "5"]
    assert {rank[devices.ORDER] for rank in told["seen"]} == {"PCI_BUS_ID"}
    assert "num_ranks=3 exceeds the 2 task slots" in told["too many"]
    assert "Each task also takes 1 of an executor's 1 GPUs." in told["too many"]
    assert re.search(r"got: .*; Spark lost executor \d on [^ ]+:\d+: .*137", told["lost"]), told["lost"]
    # Where the lost one was counted on once more, by its supervisor's line or as a slot, that generation ended at once.
    assert told["levels"] and told["levels"][-1] == 2
    assert told["results"] == [{"generation": 1 + len(told["levels"])}] * 2


def test_local_ranks_share_the_hosts_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rank_path(monkeypatch)
    monkeypatch.setenv(devices.VISIBLE, "2,4")

    def seen(num_ranks: int, launch: Launch = run_local) -> list[str]:
        results = launch(RankTask("_ranks:hello"), num_ranks, handler=Handler(lambda *_: {}))
        prefix = f"{devices.VISIBLE}="
        return [line.removeprefix(prefix) for r in results for line in r["environment"] if line.startswith(prefix)]

    assert seen(2) == ["2", "4"]
    assert "GPUs of this host" not in caplog.text
    assert seen(3) == ["2", "2", "4"]
    assert "3 ranks share 2 GPUs of this host" in caplog.text
    assert [seen(1, launch) for launch in run_local.divided(2, 1)] == [["2"], ["4"]]
    with pytest.raises(ConfigError, match="3 trials of 1 ranks at once need a GPU for each rank"):
        run_local.divided(3, 1)


def test_a_contradiction_ends_the_launch_as_the_error_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_path(monkeypatch)
    monkeypatch.setenv(devices.VISIBLE, "0")
    monkeypatch.setattr(devices, "share_out", lambda found, num_ranks: [("1",)] * num_ranks)
    with pytest.raises(ConfigError, match="contradicts the GPUs"):
        run_local(RankTask("_ranks:solo"), 1, limits=Limits(grace_s=1.0))
