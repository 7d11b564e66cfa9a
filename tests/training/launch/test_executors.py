"""What memory an executor's container has for its ranks, and what is said where that is too little."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver.commit import CommitHandler
from lockstep.training.driver.generation import RunHandler, Watch
from lockstep.training.driver.live import OnTerminal
from lockstep.training.driver.status_board import Board
from lockstep.training.driver.stop import StopRequest
from lockstep.training.launch.executors import (
    RANK_MIB,
    ExecutorMemory,
    container_of,
    killed_for_memory,
    lost_executors,
    preempted,
    task_host,
)
from lockstep.training.rules import Keep
from lockstep.training.run.lineage import claim_next
from lockstep.training.run.paths import RunPaths


@pytest.mark.parametrize(
    ("master", "settings", "ranks", "expected"),
    [
        ("yarn", {}, 2, (2048, 384, 1)),  # 1 GiB and 384 MiB, in YARN's steps; two executors by default
        ("yarn", {"spark.executor.memory": "512m", "spark.executor.memoryOverhead": "1g"}, 2, (2048, 1024, 1)),
        ("yarn", {"spark.executor.memory": "8g"}, 1, (9216, 819, 1)),  # a tenth of it
        (
            "yarn",
            {"spark.executor.memoryOverhead": "1500", "spark.executor.pyspark.memory": "600m"},
            1,
            (4096, 1500, 1),
        ),
        (
            "yarn",
            {"spark.memory.offHeap.enabled": "true", "spark.memory.offHeap.size": "1073741824"},
            1,
            (3072, 384, 1),
        ),
        ("yarn", {"spark.executor.cores": "4", "spark.executor.instances": "2"}, 6, (2048, 384, 3)),
        (
            "yarn",
            {"spark.executor.cores": "4", "spark.task.cpus": "2", "spark.executor.instances": "1"},
            6,
            (2048, 384, 2),
        ),
        ("k8s://https://host:443", {}, 2, (1433, 409, 1)),  # four tenths for Python, and no steps
        ("k8s://https://host:443", {"spark.executor.memoryOverheadFactor": "0.1"}, 2, (1408, 384, 1)),
    ],
)
def test_a_container_is_what_spark_asks_for(
    master: str, settings: dict[str, str], ranks: int, expected: tuple[int, int, int]
) -> None:
    found = container_of(master, settings, ranks)
    assert found is not None and (found.container_mib, found.overhead_mib, found.ranks) == expected


def test_yarns_step_is_the_clusters_own() -> None:
    fine, coarse = (container_of("yarn", {}, 2, step) for step in (256, 4096))
    assert fine is not None and coarse is not None and (fine.container_mib, coarse.container_mib) == (1536, 4096)


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", "spark://host:7077"])
def test_where_nobody_enforces_a_limit_there_is_none(master: str) -> None:
    assert container_of(master, {"spark.executor.memory": "1m"}, 100) is None


def test_too_little_is_refused_and_a_little_is_warned_of_with_a_flag_that_is_enough() -> None:
    memory = {mib: ExecutorMemory(mib, 1024, mib - 1024, 1) for mib in (1100, 1408, 2304, 2560)}
    with pytest.raises(ConfigError, match="a rank cannot fit into the memory") as refused:
        memory[1100].judge(RANK_MIB, "the rank")
    flag = "--conf spark.executor.memoryOverhead=1536m"  # to 2560 MiB in all
    assert refused.value.next_step == f"Give spark-submit {flag}." and refused.value.exit_code == 2
    assert flag in (memory[1408].judge(RANK_MIB, "the rank") or "")  # measured: 1,240 to 1,400 MiB
    assert [memory[mib].judge(RANK_MIB, "the rank") for mib in (2304, 2560)] == [None, None]
    with pytest.raises(ConfigError, match="a container of 2560 MiB, where at least 3155 MiB are needed"):
        memory[2560].judge(2775, "the rank of this model")
    with pytest.raises(ConfigError, match="4 ranks cannot fit"):
        ExecutorMemory(3072, 1024, 2048, 4).judge(RANK_MIB, "the rank")


KILLED = "The executor with id 3 exited with exit code 137(SIGKILL, possible container OOM)."


@pytest.mark.parametrize(
    ("reason", "memory"),
    [
        (
            "Container killed by YARN for exceeding physical memory limits. 1.6 GB of 1.5 GB physical memory used. "
            "Consider boosting spark.executor.memoryOverhead.",
            True,
        ),
        (f"{KILLED} container state: terminated exit code: 137 termination reason: OOMKilled", True),
        (f"{KILLED} container state: terminated exit code: 137 termination reason: Error", False),
        ("Container container_1_01_000002 on host: node-7 was preempted.", False),
        ("The executor with id 3 was deleted by a user or the framework.", False),
        ("Executor heartbeat timed out after 120000 ms", False),
    ],
)
def test_a_kill_for_memory_is_told_from_other_losses(reason: str, memory: bool) -> None:
    assert killed_for_memory(reason) is memory
    assert preempted(reason) is reason.endswith(("preempted.", "the framework."))


def test_the_driver_judges_the_size_that_rank_0_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs, paths = filesystem(str(tmp_path)), RunPaths(str(tmp_path))
    claim = claim_next(fs, paths, None, epochs=1, num_ranks=1)
    commits = CommitHandler(fs, paths, claim, {}, keep=Keep(1), deadline_s=1.0)
    run = str(tmp_path)
    config = TrainConfig(datasets=("data",), run=run, model="logistic", num_ranks=1, global_batch=1, epochs=1)
    with OnTerminal(config, 1) as progress:
        board = Board(progress, fs, paths, config, 1, StopRequest(), confirm=lambda: None)
        watch = Watch([1], memory=ExecutorMemory(2304, 1024, 1280, 1))
        enforced = RunHandler(paths, claim, None, commits, board, watch)
        assert enforced.answer(0, "memory", {"rank_mib": RANK_MIB}) == {}
        assert "warning" not in capsys.readouterr().err
        assert enforced.answer(0, "memory", {"rank_mib": RANK_MIB + 100}) == {}
        assert "warning: an executor's container of 2304 MiB has little room" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="cannot fit"):
            enforced.answer(0, "memory", {"rank_mib": 4000})
        adam = {"weights_bytes": 1000 << 20, "gradient_bytes": 1000 << 20, "state_bytes": 2000 << 20}
        two = RunHandler(paths, claim, None, commits, board, Watch([1, 1], memory=ExecutorMemory(4352, 1024, 3328, 1)))
        with pytest.raises(ConfigError, match="cannot fit") as caught:
            two.answer(0, "memory", {"rank_mib": 4600, **adam})
        assert caught.value.next_step.startswith(
            "does not fit: `--zero 1` on 2 ranks would (3.5 GiB a rank). Give spark"
        )
        here = RunHandler(paths, claim, None, commits, board, Watch([1, 1], host_bytes=3400 << 20))
        assert here.answer(0, "memory", {"rank_mib": 4600, **adam}) == {}
        assert "3400 for each; does not fit: `--zero 2` on 2 ranks would (3.0 GiB a rank)" in capsys.readouterr().err
        free = RunHandler(paths, claim, None, commits, board, Watch([1]))
        assert free.answer(0, "memory", {"rank_mib": 4000}) == {}


class Scala(list[Any]):
    """A sequence of Scala's, whose elements have accessors."""

    def __init__(self, *fields: dict[str, Any]) -> None:
        super().__init__(type("Element", (), {k: lambda _, v=v: v for k, v in each.items()})() for each in fields)

    def size(self) -> int:
        return len(self)

    def apply(self, number: int) -> Any:
        return self[number]


def test_a_lost_executor_that_had_a_spare_and_no_rank_explains_no_failure() -> None:
    """It may have been preempted hours ago: the failure of a rank would count as none."""

    def executor(number: str, reason: str | None) -> dict[str, Any]:
        removed = SimpleNamespace(isDefined=lambda: reason is not None, get=lambda: reason)
        return {"id": number, "hostPort": f"host-{number}:7077", "removeReason": removed}

    store = SimpleNamespace(
        executorList=lambda active: Scala(executor("0", "137"), executor("1", None), executor("2", "preempted")),
        taskList=lambda stage, begin, most: Scala(
            {"index": 0, "executorId": "0", "host": "host-0"}, {"index": 1, "executorId": "1", "host": "host-1"}
        ),
    )
    jobs = {"ranks": [3], "a spare": [4]}
    tracker = SimpleNamespace(
        getJobIdsForGroup=jobs.__getitem__, getJobInfo=lambda job: SimpleNamespace(stageIds=[job])
    )
    jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: store))
    context: Any = SimpleNamespace(statusTracker=lambda: tracker, _jsc=jsc)
    assert lost_executors(context, "ranks") == {"executor 0 on host-0:7077": "137"}
    assert [task_host(context, "ranks", rank) for rank in (0, 1, 2)] == ["host-0", "host-1", None]
