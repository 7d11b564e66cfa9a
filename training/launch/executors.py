"""Spark's executors: what memory a container has for its ranks, why one was lost, and which hosts are left out.

A container that holds more memory than it was given is killed, with all its ranks. What counts is the resident memory
of every process in it, added up; docs/operations.md has the sizes that were measured.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import ConfigError
from lockstep.training.control.failures import LauncherError, RankFailedError, Weight

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.resource import ResourceProfile

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
FAILURES, WITHIN_S = 2, 3600.0  # of a host until it is left out
LEFT_OUT_S, MOST_LEFT_OUT_S = 600.0, 7200.0  # the first time, and at most: twice as long each time
_SIZE = re.compile(r"(\d+)([kmgt]?)b?")
# YARN's words, and Kubernetes' own; Spark calls every SIGKILL a "possible container OOM".
_FOR_MEMORY = re.compile(r"exceeding (physical|virtual) memory limits|termination reason: OOMKilled")
# YARN's word, and Spark's for a pod that a person, a drained or lost node, or a pod of higher priority has removed.
_TAKEN_AWAY = re.compile(r"preempted|was deleted by a user or the framework")
GPU = "gpu"  # the resource name that Spark's settings for YARN and Kubernetes know
EXECUTOR_GPUS, TASK_GPUS = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"


@dataclass(frozen=True, slots=True)
class ExecutorMemory:
    """The memory of one executor's container, in MiB, and how many ranks share it."""

    container_mib: int
    heap_mib: int
    """The part of the container that `spark.executor.memory` sets."""
    overhead_mib: int
    """The part of the container that `spark.executor.memoryOverhead` sets: ranks live there."""
    ranks: int

    def judge(self, rank_mib: int, whose: str) -> str | None:
        """Judge whether ranks of `rank_mib` each fit in addition to Java's whole heap: None if they do, a warning if
        they may not.

        Raises ConfigError if they do not fit even while Java's heap is almost empty. `whose` names the kind of rank.
        """
        each = SUPERVISOR_MIB + rank_mib
        least = JVM_MIB + DAEMON_MIB + self.ranks * each
        outside_heap = NO_HEAP_MIB + DAEMON_MIB + self.ranks * (each + FIRST_MIB)
        if self.container_mib >= self.heap_mib + outside_heap:
            return None
        safe = self.heap_mib + (1 + SLACK) * outside_heap
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

    def rank_limit_mib(self) -> int:
        """The most that each rank may hold, in addition to what Spark takes at least."""
        return (self.container_mib - JVM_MIB - DAEMON_MIB) // self.ranks - SUPERVISOR_MIB

    def flag(self, container_mib: float) -> str:
        """The flag of spark-submit for a container of at least so many MiB."""
        more = self._rounded(container_mib) - self.container_mib
        return f"--conf {OVERHEAD}={self.overhead_mib + more}m"

    @staticmethod
    def _rounded(mib: float) -> int:
        return -(-int(mib) // STEP_MIB) * STEP_MIB


def executor_memory(context: SparkContext, num_ranks: int) -> ExecutorMemory | None:
    """The memory of an executor for its share of `num_ranks` ranks; None if no cluster manager enforces it."""
    found = context._jsc.hadoopConfiguration().get("yarn.scheduler.minimum-allocation-mb")
    return container_of(context.master or "", context.getConf(), num_ranks, int(found or 0))


def container_of(master: str, settings: Settings, num_ranks: int, yarn_least_mib: int = 0) -> ExecutorMemory | None:
    """Return what `executor_memory` does, by master and settings; `yarn_least_mib` is YARN's smallest container."""
    if master != "yarn" and not master.startswith("k8s://"):
        return None
    size = partial(_size_mib, settings)
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


def master_mib(settings: Settings, yarn_least_mib: int) -> int:
    """The container of Spark's application master on YARN in client mode, MiB."""
    memory = _size_mib(settings, "spark.yarn.am.memory", 512)
    asked = memory + _size_mib(settings, "spark.yarn.am.memoryOverhead", max(memory // 10, 384))
    return -(-asked // yarn_least_mib) * yarn_least_mib


def _size_mib(settings: Settings, name: str, default: int, unit: str = "m") -> int:
    found = _SIZE.fullmatch((settings.get(name, "") or "").strip().lower())
    return int(found[1]) * _UNITS[found[2] or unit] >> 20 if found else default


def ranks_of_executor(settings: Settings) -> int:
    """How many ranks an executor can run at once, by its cores."""
    return int(settings.get("spark.executor.cores", "1") or 1) // int(settings.get("spark.task.cpus", "1") or 1)


@lru_cache(maxsize=1)  # Spark gives each profile a number, and keeps it
def rank_profile(context: SparkContext) -> ResourceProfile | None:
    """What the task of a rank needs beyond other tasks: a GPU, where executors have some and the session's settings
    give tasks none, so that ETL in the same application needs none. None: nothing more.
    """
    settings = context.getConf()
    if float(settings.get(EXECUTOR_GPUS, "0") or 0) < 1 or settings.get(TASK_GPUS) is not None:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    cpus = int(settings.get("spark.task.cpus", "1") or 1)
    return ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus).resource(GPU, 1)).build


def first_line(error: Exception) -> str:
    """The line of an error of py4j or Spark that names its cause, of the many that it has."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (causes or lines or [type(error).__name__])[0]


def _tasks(context: SparkContext, group: str) -> list[Any]:
    """The tasks of the newest job of a group, as Spark's status store has them."""
    jobs = context.statusTracker().getJobIdsForGroup(group)
    info = context.statusTracker().getJobInfo(max(jobs)) if jobs else None
    tasks = [context._jsc.sc().statusStore().taskList(stage, 0, 1 << 20) for stage in (info.stageIds if info else ())]
    return [of_stage.apply(number) for of_stage in tasks for number in range(of_stage.size())]


def lost_executors(context: SparkContext, group: str) -> dict[str, str]:
    """Why Spark has lost executors with tasks of a group's newest job, and not with spares or none: "executor ID on
    HOST:PORT" to the reason in the cluster manager's words.
    """
    store = context._jsc.sc().statusStore()  # neither pyspark nor its Java API says why an executor was removed
    found, used = store.executorList(False), {str(task.executorId()) for task in _tasks(context, group)}
    summaries = [found.apply(number) for number in range(found.size())]
    return {
        f"executor {one.id()} on {one.hostPort()}": " ".join(str(one.removeReason().get()).split())
        for one in summaries
        if one.removeReason().isDefined() and str(one.id()) in used
    }


def preempted(reason: str) -> bool:
    """Whether the cluster manager took an executor away for others."""
    return _TAKEN_AWAY.search(reason.lower()) is not None


def killed_for_memory(reason: str) -> bool:
    """Whether the cluster manager killed an executor for its memory."""
    return _FOR_MEMORY.search(reason) is not None


def slots_outside(context: SparkContext, hosts: Collection[str]) -> dict[str, int]:
    """Task slots, free or not, of each live executor's host that is not among `hosts`."""
    store = context._jsc.sc().statusStore()  # as for lost_executors
    found = store.executorList(True)
    slots: dict[str, int] = {}
    for one in (found.apply(number) for number in range(found.size())):
        host = str(one.hostPort()).rpartition(":")[0]
        if one.id() != "driver" and host not in hosts:
            slots[host] = slots.get(host, 0) + int(one.maxTasks())
    return slots


def task_host(context: SparkContext, group: str, index: int) -> str | None:
    """The host of a task of the newest job of a group, by Spark's name; None if it has not started.

    BarrierTaskInfo has the address from which the executor called, and preferences are compared to its name.
    """
    return next((str(one.host()) for one in _tasks(context, group) if one.index() == index), None)


def failed_host(error: BaseException) -> str | None:
    """The host that may be at fault for the end of a generation; None if none is, or if it is unknown.

    A rank that raised an error, or lost another one, says nothing about its host.
    """
    if isinstance(error, RankFailedError):
        blamed = error.weight in (Weight.ENDED, Weight.LOST, Weight.SILENT)
        return error.executor_host if blamed else None
    return error.host if isinstance(error, LauncherError) else None


@dataclass(slots=True)
class HostFailures:
    """Failures of a run by host; a host with FAILURES within WITHIN_S is left out for a while, then taken back."""

    clock: Callable[[], float] = time.monotonic
    _recent: dict[str, deque[float]] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)
    """How often a host was left out."""
    _until: dict[str, float] = field(default_factory=dict)

    def failed(self, host: str) -> float | None:
        """Count a failure; returns for how many seconds the host is left out if it is from now on, else None."""
        now = self.clock()
        if host in self.left_out():
            return None  # it is used, as there is no other
        recent = self._recent.setdefault(host, deque())
        recent.append(now)
        while recent[0] < now - WITHIN_S:
            recent.popleft()
        if len(recent) < FAILURES:
            return None
        recent.clear()
        seconds = min(MOST_LEFT_OUT_S, LEFT_OUT_S * 2.0 ** self._times.get(host, 0))
        self._times[host] = self._times.get(host, 0) + 1
        self._until[host] = now + seconds
        return seconds

    def left_out(self) -> frozenset[str]:
        """The hosts that get no ranks now, if others have slots."""
        now = self.clock()
        return frozenset(host for host, until in self._until.items() if now < until)
