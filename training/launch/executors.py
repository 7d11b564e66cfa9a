"""Spark's executors under YARN and Kubernetes: what memory a container has for its ranks, and why one was lost.

A container that holds more memory than it was given is killed, with all its ranks. What counts is the resident memory
of every process in it, added up; docs/operations.md has the sizes that were measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext

    Settings = SparkConf | Mapping[str, str]

OVERHEAD = "spark.executor.memoryOverhead"
# MiB resident, measured under YARN (docs/operations.md).
JVM_MIB = 250
"""Java of an executor that has only ranks. After an ETL, or with time, it takes its heap and NO_HEAP_MIB."""
NO_HEAP_MIB, DAEMON_MIB, SUPERVISOR_MIB = 150, 45, 85
RANK_MIB = 850
"""A rank that trains a small model: TensorFlow, Keras, kernels from their cache."""
FIRST_MIB = 150
"""What a rank takes in addition while it compiles the kernels, at a node's first job, or sends a checkpoint to HDFS."""
SLACK = 0.1
STEP_MIB = 256
_YARN_LEAST_MIB = 1024  # yarn.scheduler.minimum-allocation-mb, where this host's configuration names none
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)([kmgt]?)b?")
# YARN's words, and those of Spark on Kubernetes: "exited with exit code 137(SIGKILL, possible container OOM)".
_FOR_MEMORY = re.compile(r"exceeding (physical|virtual) memory limits|container OOM")


@dataclass(frozen=True, slots=True)
class ExecutorMemory:
    """The memory of one executor's container, in MiB, and how many ranks share it."""

    container_mib: int
    heap_mib: int
    """The part of it that `spark.executor.memory` sets."""
    overhead_mib: int
    """The part of it that `spark.executor.memoryOverhead` sets: ranks live there."""
    ranks: int

    def judge(self, rank_mib: int, whose: str) -> str | None:
        """None where ranks of `rank_mib` each fit in addition to Java's whole heap, a warning where they may not.

        Raises ConfigError where they do not fit even while Java holds little. `whose` says what kind of rank it is.
        """
        each = SUPERVISOR_MIB + rank_mib
        least = JVM_MIB + DAEMON_MIB + self.ranks * each
        beside_heap = NO_HEAP_MIB + DAEMON_MIB + self.ranks * (each + FIRST_MIB)
        if self.container_mib >= self.heap_mib + beside_heap:
            return None
        safe = self.heap_mib + (1 + SLACK) * beside_heap
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "a rank"
        parts = f"{JVM_MIB + DAEMON_MIB} MiB for Spark, {SUPERVISOR_MIB} for each supervisor, {rank_mib} for {whose}"
        if self.container_mib >= (1 - SLACK) * least:
            return (
                f"warning: an executor's container of {self.container_mib} MiB has little room for {ranks}: at least "
                f"{least} MiB ({parts}), and more as Java's heap of {self.heap_mib} MiB fills. A container above its "
                f"limit is killed; {self.flag(safe)} gives it more."
            )
        raise ConfigError(
            f"{ranks} cannot fit into the memory of an executor's container",
            got=f"a container of {self.container_mib} MiB, where at least {least} MiB are needed ({parts})",
            allowed=f"{self._rounded(safe)} MiB or more",
            next_step=f"Give spark-submit {self.flag(safe)}.",
        )

    def flag(self, container_mib: float) -> str:
        """The flag of spark-submit for a container of at least so many MiB."""
        more = self._rounded(container_mib) - self.container_mib
        return f"--conf {OVERHEAD}={self.overhead_mib + more}m"

    @staticmethod
    def _rounded(mib: float) -> int:
        return -(-int(mib) // STEP_MIB) * STEP_MIB


def executor_memory(context: SparkContext, num_ranks: int) -> ExecutorMemory | None:
    """What an executor of this application has for its share of `num_ranks` ranks; None where nobody enforces it."""
    found = context._jsc.hadoopConfiguration().get("yarn.scheduler.minimum-allocation-mb")
    return container_of(context.master or "", context.getConf(), num_ranks, int(found or 0))


def container_of(master: str, settings: Settings, num_ranks: int, yarn_least_mib: int = 0) -> ExecutorMemory | None:
    """`executor_memory` by a master and the settings that were given; `yarn_least_mib`: YARN's smallest container."""
    if master != "yarn" and not master.startswith("k8s://"):
        return None

    def size(name: str, default: int, unit: str = "m") -> int:
        found = _SIZE.fullmatch((settings.get(name, "") or "").strip().lower())
        return int(found[1]) * _UNITS[found[2] or unit] >> 20 if found else default

    heap = size("spark.executor.memory", 1024)
    # Spark's defaults; on Kubernetes that of an application in Python.
    factor = float(settings.get(f"{OVERHEAD}Factor", "") or ("0.1" if master == "yarn" else "0.4"))
    overhead = size(OVERHEAD, max(int(factor * heap), size("spark.executor.minMemoryOverhead", 384)))
    off_heap = settings.get("spark.memory.offHeap.enabled", "false") == "true"
    asked = heap + overhead + size("spark.executor.pyspark.memory", 0)
    asked += size("spark.memory.offHeap.size", 0, "b") if off_heap else 0
    if master == "yarn":
        least = yarn_least_mib or _YARN_LEAST_MIB
        asked = -(-asked // least) * least
    executors = int(settings.get("spark.executor.instances", "2") or 2)
    ranks = min(-(-num_ranks // max(1, executors)), ranks_of_executor(settings))
    return ExecutorMemory(asked, heap, overhead, max(1, ranks))


def ranks_of_executor(settings: Settings) -> int:
    """How many ranks an executor can hold at once, by its cores."""
    return int(settings.get("spark.executor.cores", "1") or 1) // int(settings.get("spark.task.cpus", "1") or 1)


def lost_executors(context: SparkContext) -> dict[str, str]:
    """Why Spark has lost executors: "executor ID on HOST:PORT" to the reason in the cluster manager's words."""
    store = context._jsc.sc().statusStore()  # neither pyspark nor its Java API says why an executor was removed
    found = store.executorList(False)
    summaries = [found.apply(number) for number in range(found.size())]
    return {
        f"executor {one.id()} on {one.hostPort()}": " ".join(str(one.removeReason().get()).split())
        for one in summaries
        if one.removeReason().isDefined()
    }


def killed_for_memory(reason: str) -> bool:
    """Whether the cluster manager has killed an executor for the memory that it held."""
    return _FOR_MEMORY.search(reason) is not None
