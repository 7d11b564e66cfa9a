"""Spark's GPU addresses end in the ranks' CUDA_VISIBLE_DEVICES: real workers and executors, GPUs that are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training import devices
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.barrier import tasks_on_gpus
from lockstep.training.launch.local import run_local
from lockstep.training.launch.session import Launch
from tests.training._gpu_driver import ROOT
from tests.training._ranks import rank_path

pytestmark = pytest.mark.slow


def spark_home(folder: Path) -> Path:
    """The installed Spark under another path: workers of a local cluster put their folders into its home."""
    assert pyspark.__file__ is not None
    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def driver(folder: Path, *more: str) -> dict[str, Any]:
    """What `tests.training._gpu_driver` says, in a process of its own: this one's Spark session has another master."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "CUDA_"))}
    environment |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(ROOT / "tests" / "spark"),
        "SPARK_HOME": str(spark_home(folder / "spark")),
        "PYSPARK_SUBMIT_ARGS": "--driver-memory 512m pyspark-shell",
    }
    command = [sys.executable, "-m", "tests.training._gpu_driver", str(folder / "gpus"), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_each_rank_sees_the_gpu_of_its_task_and_a_lost_executor_is_replaced(tmp_path: Path) -> None:
    told = driver(tmp_path)
    assert sorted(rank[devices.VISIBLE] for rank in told["seen"]) == ["3", "5"]
    assert {rank[devices.ORDER] for rank in told["seen"]} == {"PCI_BUS_ID"}
    assert "3 ranks, servers and spares exceed the 2 task slots" in told["too many"]
    assert "Each task also takes 1 of an executor's 1 GPUs." in told["too many"]
    assert re.search(r"got: .*; Spark lost executor \d on [^ ]+:\d+: .*137", told["lost"]), told["lost"]
    # Where the lost one was counted on once more, by its supervisor's line or as a slot, that generation ended at once.
    assert told["levels"] and told["levels"][-1] == 2
    assert told["results"] == [{"generation": 1 + len(told["levels"])}] * 2


@pytest.mark.soak
@pytest.mark.parametrize(
    ("amount", "ranks", "seen", "too_many"),
    [
        ("0.5", 2, ["3", "3"], "Each task also takes 0.5 of an executor's 1 GPUs."),
        ("2", 1, ["3,5"], "Each task also takes 2 of an executor's 2 GPUs."),
        # Tasks of the session need no GPU, as ETL's; a rank's takes one.
        ("none", 1, ["3"], "Each task also takes 1 of an executor's 1 GPUs."),
    ],
)
def test_tasks_share_a_gpu_or_have_two(tmp_path: Path, amount: str, ranks: int, seen: list[str], too_many: str) -> None:
    """One executor: two ranks on its GPU, or a rank with both of its GPUs; one rank more has no slot."""
    told = driver(tmp_path, amount, str(ranks))
    assert [rank[devices.VISIBLE] for rank in told["seen"]] == seen
    assert f"{ranks + 1} ranks, servers and spares exceed the {ranks} task slots" in told["too many"]
    assert too_many in told["too many"]
    assert any(told["other tasks"]) is (amount != "none")


@pytest.mark.parametrize(
    ("gpus", "per_task", "tasks"),
    [(1, 0.5, 2), (1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 1), (1, 0.1, 10), (3, 1 / 3, 9), (2, 0.4, 4), (2, 0.6, 2)],
)
def test_a_part_of_a_gpu_is_of_one_gpu(gpus: float, per_task: float, tasks: int) -> None:
    """Two GPUs have room for four tasks of 0.4, not for five: what is left of both is no part of either."""
    assert tasks_on_gpus(gpus, per_task) == tasks


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
