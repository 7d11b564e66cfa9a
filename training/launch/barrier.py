"""Ranks in a Spark barrier stage: each task is a supervisor, which may run several generations of its rank."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.spark.java_signals import signals_of_java
from lockstep.spark.node_python import wrong_python
from lockstep.storage.errors import ConfigError
from lockstep.training.control.failures import (
    LauncherError,
    LauncherGoneError,
    MemoryKillError,
    PreemptedError,
    RankFailedError,
    RankState,
)
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.devices import of_runs, shares_of_host
from lockstep.training.launch.application import ENDS_S, check_application
from lockstep.training.launch.executors import (
    EXECUTOR_GPUS,
    GPU,
    RANK_MIB,
    TASK_GPUS,
    ExecutorMemory,
    executor_memory,
    first_line,
    killed_for_memory,
    lost_executors,
    preempted,
    rank_profile,
    ranks_of_executor,
    slots_outside,
    task_host,
)
from lockstep.training.launch.process import SupervisorSpec
from lockstep.training.launch.session import Session, SessionLauncher
from lockstep.training.launch.spares import Spare, close_all
from lockstep.training.launch.supervisor import supervise

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
ANY_HOST = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_TASK_RESOURCE = re.compile(r"spark\.task\.resource\.(.+)\.amount")
MORE_MEMORY = 1.5  # advised after a kill: how much memory the ranks would have taken is unknown
REASON_S = 10.0  # for the stage to fail after an executor is lost: the cluster manager says why it ended
SLOTS_LOOK_S = 1.0
SLOTS_QUIET_S = 10.0  # an executor starts in less, as a rule
AUTHENTICATES = "spark.authenticate"
ENCRYPTS = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")


def classic_context(spark: SparkSession) -> SparkContext:
    """The session's SparkContext; raises ConfigError for Spark Connect, whose client has none."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            "ranks cannot be started over Spark Connect",
            got="a Spark Connect session: no SparkContext, and executors cannot connect to this process",
            allowed="a classic session (local, YARN, Kubernetes, standalone)",
            next_step="Start the job by spark-submit or with --master, without a remote URL; or use --launcher local.",
        )
    return spark.sparkContext


def in_driver(master: str) -> bool:
    """Whether tasks are threads of the driver's JVM (local, local[N]): no executors, and no GPUs from Spark."""
    return master.startswith("local") and not master.startswith("local-cluster")


def check_slots(
    context: SparkContext, num_tasks: int, wait_s: float, ended: Callable[[], BaseException | None] = lambda: None
) -> None:
    """Raise ConfigError unless `num_tasks` tasks fit at once.

    On a cluster, it waits up to `wait_s` seconds for executors that are still starting, unless the requested ones
    cannot suffice, or `ended()` returns an error, which it raises: another driver may have taken the run over.
    """
    settings = context.getConf()
    if settings.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise ConfigError(
            "a barrier stage cannot run under dynamic allocation",
            got="spark.dynamicAllocation.enabled=true",
            allowed="a fixed number of executors",
            next_step="Set spark.dynamicAllocation.enabled=false and spark.executor.instances.",
        )
    master = context.master or ""
    local = in_driver(master)
    asked = int(settings.get("spark.executor.instances") or ("2" if master == "yarn" else "0"))  # YARN's default
    began, said = time.monotonic(), False
    end = began + (0.0 if local else wait_s)
    while (slots := slots_now(context)) < num_tasks:
        if (error := ended()) is not None:
            raise error
        each = ranks_of_executor(settings)
        gpus = float(settings.get(EXECUTOR_GPUS, "0") or 0)
        per_task = 1.0 if rank_profile(context) is not None else float(settings.get(TASK_GPUS, "0") or 0)
        each = min(each, tasks_on_gpus(gpus, per_task)) if per_task else each
        hopeless = not local and asked > 0 and asked * each < num_tasks
        room = max(slots, asked * each) if hopeless else slots  # some may be on their way
        given = f"{slots // each} of the {asked} executors asked for" if asked and not hopeless and not local else ""
        fewer = f"lower --num-ranks, servers and spares to {room} in all, or " if room else ""
        if hopeless or time.monotonic() >= end:
            if local:
                how = f"give --master 'local[{num_tasks}]'"
            elif given:
                how = "free or enlarge the cluster or its queue"
            else:
                how = "raise --num-executors (spark.executor.instances) or --executor-cores (spark.executor.cores)"
            if not local and not hopeless:
                how += (
                    f"; or, if other applications hold the rest of the cluster, wait for their end (after {wait_s:g} s)"
                )
            raise ConfigError(
                f"{num_tasks} ranks, servers and spares exceed the {room} task slots of this Spark session",
                got=f"{room} slots on {context.master}" + (f": {given} came" if given else ""),
                allowed="a slot for every rank, server and spare at once: a barrier stage needs them",
                next_step=f"{fewer}{how}.".capitalize()
                + (f" Each task also takes {per_task:g} of an executor's {gpus:g} GPUs." if per_task else ""),
            )
        if not said and time.monotonic() - began >= SLOTS_QUIET_S:
            said = True
            came = f", by {given}; if no more come, {fewer}free or enlarge the cluster or its queue" if given else ""
            waits = "%d ranks, servers and spares wait up to %g s for task slots: the cluster has given %d%s"
            log.warning(waits, num_tasks, wait_s, slots, came)
        time.sleep(SLOTS_LOOK_S)


def tasks_on_gpus(gpus: float, per_task: float) -> int:
    """Tasks that an executor of `gpus` GPUs can run at once if each takes `per_task` > 0: a part of one, or several."""
    return int(gpus) * int(1 / per_task + 1e-9) if per_task < 1 else int(gpus // per_task)


def slots_now(context: SparkContext) -> int:
    """Tasks of one stage that the registered executors can run at once, as Spark's own barrier check counts them.

    Raises ApplicationEndedError if the cluster has ended the application.
    """
    check_application(context)
    scala = context._jsc.sc()  # neither pyspark nor its Java API has a public accessor for this count
    profile, profiles = rank_profile(context), scala.resourceProfileManager()
    of_ranks = profiles.defaultResourceProfile() if profile is None else profile._java_resource_profile
    profiles.addResourceProfile(of_ranks)  # does nothing for one that Spark knows
    return int(scala.maxNumConcurrentTasks(of_ranks))


def check_spark_encrypts(master: str, settings: Mapping[str, str]) -> None:
    """Raise ConfigError if Spark would send the secrets that TLS depends on in the clear, or to strangers.

    Executors on this host (local masters) are reached over loopback, where no other host can listen.
    """
    on = {name for name in (AUTHENTICATES, *ENCRYPTS) if settings.get(name, "false").lower() == "true"}
    if master.startswith("local") or (AUTHENTICATES in on and len(on) > 1):
        return
    how = "in the clear" if AUTHENTICATES in on else "to anyone who asks"
    raise ConfigError(
        f"--tls on protects nothing while Spark sends the ranks' keys {how}",
        got=", ".join(f"{name}={settings.get(name, 'false')}" for name in (AUTHENTICATES, *ENCRYPTS)),
        allowed=f"{AUTHENTICATES}=true with {ENCRYPTS[0]}=true or {ENCRYPTS[1]}=true",
        next_step="Give spark-submit --conf spark.authenticate=true --conf spark.network.crypto.enabled=true, "
        "or leave --tls off (docs/security.md).",
    )


@dataclass(frozen=True, slots=True)
class SuperviseOnTask:
    """The function of the barrier stage; picklable by reference, so that executors import it."""

    control: tuple[str, int]
    secret: bytes = field(repr=False)
    """The launch's secret, which is sent in Spark's messages: see docs/security.md."""
    limits: Limits
    devices: Sequence[tuple[str, ...]]
    """The GPUs of each rank under a local master, where Spark gives tasks none."""

    def __call__(self, rows: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Supervise this task's rank until the driver ends the session; yields (rank, exit code)."""
        from pyspark import BarrierTaskContext, SparkFiles

        os.environ["LOCKSTEP_FILES"] = SparkFiles.getRootDirectory()  # a script's --files; the rank inherits it
        context = BarrierTaskContext.get()
        hosts = tuple(info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos())
        rank = context.partitionId()
        gpu = context.resources().get(GPU)
        devices = tuple(gpu.addresses) if gpu else self.devices[rank]
        spec = SupervisorSpec(rank, hosts, self.control, self.secret, self.limits, devices)
        yield rank, supervise(spec, _take_hadoop_settings)


def _take_hadoop_settings(task: RankTask) -> None:
    if task.hadoop:
        from lockstep.storage.settings import set_hadoop_settings

        set_hadoop_settings(task.hadoop)  # the rank's log is uploaded from here


def ranks_on(context: SparkContext, num_ranks: int, avoid: frozenset[str]) -> RDD[int]:
    """A partition for each rank; as many as have slots there prefer hosts other than `avoid`.

    Spark serves preferences first, and a barrier stage starts all its tasks in one round of offers: a host is kept free
    without a task that runs on it.
    """
    slots = slots_outside(context, avoid) if avoid else {}
    if not slots:
        return context.parallelize(range(num_ranks), num_ranks)
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    # Only Scala's API takes preferred hosts.
    jvm, serializer, room = context._jvm, CPickleSerializer(), sum(slots.values())
    assert jvm is not None, "a context has one"
    to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
    hosts, none = to_seq(sorted(slots)), to_seq([])
    pairs = [jvm.scala.Tuple2(bytearray(serializer.dumps(r)), hosts if r < room else none) for r in range(num_ranks)]
    rows = context._jsc.sc().makeRDD(to_seq(pairs), jvm.scala.reflect.ClassTag.AnyRef())
    return RDD(rows.toJavaRDD(), context, serializer)


class BarrierSession(Session):
    """A session whose supervisors are the tasks of one barrier stage."""

    def __init__(
        self,
        spark: SparkSession,
        num_ranks: int,
        limits: Limits | None = None,
        own_devices: tuple[str, ...] | None = None,
    ) -> None:
        self._context = classic_context(spark)
        self._own_devices = own_devices
        self._master = self._context.master or ""
        with jvm_lives():
            self._settings = dict(self._context.getConf().getAll())
        super().__init__(num_ranks, limits or Limits(), *control_hosts(self._master, self._settings))
        self._group = f"lockstep-{secrets.token_hex(8)}"
        self._stage: threading.Thread | None = None
        self._kept: list[Spare] = []

    def run(
        self,
        task: RankTask,
        generation: int,
        handler: Handler | None = None,
        on_steps: Callable[[Sequence[RankState]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run as `Session.run` does; if ranks were lost with their executor, the error says why Spark lost it.

        Raises MemoryKillError if the cluster manager killed an executor for its memory, PreemptedError if it took all
        lost ones away for others.
        """
        try:
            return super().run(task, generation, handler, on_steps)
        except (RankFailedError, LauncherError) as error:
            if not isinstance(error, LauncherGoneError):
                self._explain(error)
            if isinstance(error, RankFailedError) and not in_driver(self._master):
                with jvm_lives():
                    error.executor_host = task_host(self._context, self._group, error.rank)
            raise

    def _explain(self, error: RankFailedError | LauncherError) -> None:
        """Add to `error` why Spark lost executors since the stage began; raise MemoryKillError if for memory, and
        ApplicationEndedError if it has lost all with the application.
        """
        gone = set() if self._roster is None else self._roster.gone()
        if self._stage is not None and gone and not in_driver(self._master):
            self._stage.join(REASON_S)
        with jvm_lives():
            everyone = self._master == "yarn" and len(gone) == self.num_ranks
            check_application(self._context, ENDS_S if everyone else 0.0)
        if in_driver(self._master) or self._stage is None or not gone:
            return  # every supervisor is connected, so its executor lives too
        with jvm_lives():
            lost = lost_executors(self._context, self._group)
            memory = executor_memory(self._context, self.num_ranks)
        for who, why in lost.items():
            if memory is not None and killed_for_memory(why):
                flag = memory.flag(MORE_MEMORY * memory.container_mib)
                raise MemoryKillError(
                    error.what,
                    got=f"{who}: {why}",
                    allowed=f"{memory.container_mib} MiB for all processes of an executor's container",
                    next_step=f"Give spark-submit {flag}, which is half as much again.",
                ) from error
        if lost and all(map(preempted, lost.values())):
            raise PreemptedError(
                error.what,
                got="; ".join(f"{who}: {why}" for who, why in lost.items()),
                allowed="executors that stay",
                next_step="Nothing: the run resumes from its last checkpoint, and this counts as no failure.",
            ) from error
        if lost:
            if isinstance(error, LauncherError):
                error.host = next(iter(lost)).partition(" on ")[2].rpartition(":")[0]
            error.got += "; Spark lost " + "; ".join(f"{who}: {why}" for who, why in lost.items())

    def _check(self, task: RankTask, ended: Callable[[], BaseException | None]) -> None:
        if task.tls:
            check_spark_encrypts(self._master, self._settings)
        with jvm_lives():
            check_slots(self._context, self.num_ranks, self.limits.start_s, ended)
        if others := other_resources(self._settings):
            log.warning("ranks use only Spark's resource `gpu`, and compute without %s", ", ".join(others))

    def _begin(self, control: tuple[str, int], secret: bytes) -> None:
        from pyspark import InheritableThread

        local, num_ranks = in_driver(self._master), self.num_ranks
        shares = shares_of_host(os.environ, num_ranks, self._own_devices) if local else [()] * num_ranks
        keep = SuperviseOnTask(control, secret, self.limits, shares)
        self._stage = InheritableThread(target=self._run_stage, args=(keep,), name="barrier-stage", daemon=True)
        self._stage.start()
        assert self._roster is not None, "supervisors connect to it"
        where = (self.limits, self._bind_host, self._host, self._roster)
        self._kept = [Spare(self._context, *where) for _ in range(self.spares)]

    def _run_stage(self, keep: SuperviseOnTask) -> None:
        context, num_ranks = self._context, self.num_ranks
        context.setJobGroup(self._group, f"{num_ranks} training ranks", interruptOnCancel=True)
        try:
            ranks, profile = ranks_on(context, num_ranks, self.avoid), rank_profile(context)
            if profile is not None:
                ranks = ranks.withResources(profile)
            ranks.barrier().mapPartitions(keep).collect()
        except Exception as error:  # py4j's and Spark's errors have no common base; the waiting driver raises it
            log.info("the barrier stage ended: %s", error)
            self.fail(
                wrong_python(str(error))
                or LauncherError(
                    "the barrier stage of the ranks failed",
                    got=first_line(error),
                    allowed="a stage that lasts as long as its ranks",
                    next_step="Look at the executors' logs: a lost executor ends its rank too.",
                )
            )

    def _end(self) -> None:
        close_all(self._kept)
        if self._stage is None:
            return
        self._stage.join(2.0)  # all ranks have ended: so do their tasks
        if self._stage.is_alive():
            with jvm_lives():
                self._context.cancelJobGroup(self._group)
            self._stage.join(self.limits.grace_s + 5.0)


@dataclass(frozen=True, slots=True)
class OnSpark(SessionLauncher):
    """Launches ranks on a Spark cluster, one barrier task for each.

    A launch raises ConfigError at once if the session has fewer task slots than ranks, is a Spark Connect session, or
    would send the secrets of TLS between ranks in the clear.
    """

    spark: SparkSession
    devices: tuple[str, ...] | None = None
    """The only GPUs that ranks get under a local master; None: all of this host."""

    def application(self) -> str | None:
        """Return Spark's ID of the application."""
        return str(classic_context(self.spark).applicationId)

    def slots(self) -> int:
        """Task slots of the executors that are registered now."""
        with jvm_lives():
            return slots_now(classic_context(self.spark))

    def room_outside(self, hosts: frozenset[str]) -> int:
        """Task slots of executors on other hosts; 0 under a local master, which has no executors."""
        with jvm_lives():
            return sum(slots_outside(classic_context(self.spark), hosts).values())

    def ready(self, num_ranks: int, wait_s: float, most: int | None = None) -> ExecutorMemory | None:
        """Raise ConfigError unless the session has memory and task slots (`check_slots`) for all ranks at once.

        Returns the memory of an executor for its ranks, if the cluster manager enforces it.
        """
        context = classic_context(self.spark)
        with jvm_lives():
            memory = executor_memory(context, most or num_ranks)
            if memory is not None:
                memory.judge(RANK_MIB, "the rank of the smallest model")
            check_slots(context, num_ranks, wait_s)
        return memory

    def replaces(self) -> bool:
        """Whether the master is Kubernetes, which signals a pod that is to end, and where Spark starts another one."""
        return (classic_context(self.spark).master or "").startswith("k8s://")

    def signals(self) -> AbstractContextManager[None]:
        """Return `signals_of_java` for the session's Java process."""
        return signals_of_java(classic_context(self.spark)._gateway)

    def session(self, num_ranks: int, limits: Limits) -> Session:
        """Supervisors in the tasks of one barrier stage, which begins with the first run."""
        return BarrierSession(self.spark, num_ranks, limits, self.devices)

    def divided(self, runs: int, num_ranks: int) -> Sequence[SessionLauncher]:
        """One for each run; on a cluster Spark gives each task GPUs of its own."""
        if not in_driver(classic_context(self.spark).master or ""):
            return [self] * runs
        return [replace(self, devices=share) for share in of_runs(os.environ, runs, num_ranks)]


def control_hosts(master: str, settings: Mapping[str, str]) -> tuple[str, str]:
    """Return (address that the control server listens on, host name or address at which executors reach it).

    If the executors are processes of this host, it listens on loopback only. Otherwise it listens where Spark's driver
    does (spark.driver.bindAddress), by default on all interfaces: spark.driver.host may be a name that only other hosts
    can use.
    """
    if master.startswith("local"):  # local[...] and local-cluster[...]
        return LOOPBACK, LOOPBACK
    return settings.get("spark.driver.bindAddress") or ANY_HOST, settings.get("spark.driver.host") or "localhost"


def other_resources(settings: Mapping[str, str]) -> list[str]:
    """Resources that Spark gives to tasks and that ranks do not use: all but `gpu`."""
    found = (_TASK_RESOURCE.fullmatch(name) for name in settings)
    return sorted({match[1] for match in found if match} - {GPU})


@contextmanager
def jvm_lives() -> Iterator[None]:
    """Turn py4j's errors into LauncherGoneError if its Java process has ended."""
    from py4j.protocol import Py4JNetworkError

    try:
        yield
    except (OSError, Py4JNetworkError) as error:
        raise LauncherGoneError(
            "Spark's Java process of this driver has ended",
            got=first_line(error),
            allowed="a process that lasts as long as its ranks",
            next_step="Find out why it ended (memory?), then start again with the same flags: the run resumes from its "
            "last checkpoint.",
        ) from error
