"""Ranks inside a Spark barrier stage: each task is a supervisor."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.comm.tls import Credentials, issue
from training.control.failures import LauncherError, LauncherGoneError
from training.control.protocol import new_key
from training.control.server import ControlServer
from training.devices import shares_of_host
from training.launch.encryption import check_spark_encrypts
from training.launch.slots import check_slots, classic_context, in_driver
from training.launch.supervisor import Order, Supervisor
from training.launch.task import Handler, Limits, RankTask
from training.world import World

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ANY_HOST = "0.0.0.0"
LOOPBACK = "127.0.0.1"
GPU = "gpu"  # Spark's name for them, which its own settings for YARN and Kubernetes know
_TASK_RESOURCE = re.compile(r"spark\.task\.resource\.(.+)\.amount")


@dataclass(frozen=True, slots=True)
class SuperviseOnTask:
    """The function of the barrier stage; picklable by reference, so that executors import it."""

    task: RankTask
    generation: int
    control: tuple[str, int]
    key: bytes = field(repr=False)
    limits: Limits
    tls: Sequence[Credentials | None]
    """By rank. Like the key it travels in Spark's own messages: see docs/security.md."""
    devices: Sequence[tuple[str, ...]]
    """By rank, where a local master runs all of them: Spark gives its tasks no GPUs then."""

    def __call__(self, rows: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Supervise the rank of this task; yields (rank, exit code)."""
        from pyspark import BarrierTaskContext, SparkFiles

        os.environ["LOCKSTEP_FILES"] = SparkFiles.getRootDirectory()  # a script's --files; the rank inherits it
        if self.task.hadoop:
            from storage.settings import set_hadoop_settings

            set_hadoop_settings(self.task.hadoop)  # the rank's log is uploaded from here
        context = BarrierTaskContext.get()
        hosts = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
        rank = context.partitionId()
        world = World.from_hosts(rank, hosts, self.generation)
        gpu = context.resources().get(GPU)
        devices = tuple(gpu.addresses) if gpu else self.devices[rank]
        order = Order(self.task, world, hosts[rank], self.control, self.key, self.limits, devices, self.tls[rank])
        yield rank, Supervisor(order).run()


@dataclass(frozen=True, slots=True)
class OnSpark:
    """`run_barrier` with its session bound, for the driver: which asks `ready` before it writes anything."""

    spark: SparkSession

    def ready(self, num_ranks: int, wait_s: float) -> None:
        """Raise ConfigError unless the session can hold all ranks at once; see `check_slots`."""
        with _jvm_lives():
            check_slots(classic_context(self.spark), num_ranks, wait_s)

    def __call__(
        self,
        task: RankTask,
        num_ranks: int,
        *,
        generation: int = 1,
        limits: Limits | None = None,
        handler: Handler | None = None,
    ) -> list[dict[str, Any]]:
        """See `run_barrier`."""
        return run_barrier(self.spark, task, num_ranks, generation=generation, limits=limits, handler=handler)


def run_barrier(
    spark: SparkSession,
    task: RankTask,
    num_ranks: int,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    handler: Handler | None = None,
) -> list[dict[str, Any]]:
    """`run_local` on a Spark cluster: one barrier task a rank.

    Raises ConfigError at once where the session has fewer task slots than ranks, is a Spark Connect session, or would
    send in the clear what TLS between ranks rests on.
    """
    limits = limits or Limits()
    context = classic_context(spark)
    with _jvm_lives():
        settings = dict(context.getConf().getAll())
        if task.tls:
            check_spark_encrypts(context.master or "", settings)
        check_slots(context, num_ranks, limits.start_s)
    if others := other_resources(settings):
        log.warning("ranks take GPUs from Spark's resource `gpu` alone, and compute without %s", ", ".join(others))
    key = new_key()
    group = f"lockstep-{secrets.token_hex(8)}"
    bind, host = control_hosts(context.master or "", settings)
    stage: threading.Thread | None = None
    try:
        with ControlServer(key, generation, num_ranks, limits, handler, bind) as server:
            certificates = issue(generation, num_ranks) if task.tls else [None] * num_ranks
            mine = in_driver(context.master or "")
            shares = shares_of_host(os.environ, num_ranks) if mine else [()] * num_ranks
            supervise = SuperviseOnTask(task, generation, (host, server.port), key, limits, certificates, shares)
            stage = _start(context, group, supervise, num_ranks, server)
            return server.wait()
    finally:
        if stage is not None:
            _end(context, group, stage, limits)


def control_hosts(master: str, settings: Mapping[str, str]) -> tuple[str, str]:
    """(address that the control server listens on, host name or address that executors reach it by).

    Where the executors are processes of this host, nobody else can reach it. Else it listens as Spark's own driver is
    told to (spark.driver.bindAddress), without that on all interfaces: spark.driver.host may be a name of this host
    that only others can use.
    """
    if master.startswith("local"):  # local[...] and local-cluster[...]
        return LOOPBACK, LOOPBACK
    return settings.get("spark.driver.bindAddress") or ANY_HOST, settings.get("spark.driver.host") or "localhost"


def other_resources(settings: Mapping[str, str]) -> list[str]:
    """Resources that Spark gives to tasks, and that no rank makes use of: all but `gpu`."""
    found = (_TASK_RESOURCE.fullmatch(name) for name in settings)
    return sorted({match[1] for match in found if match} - {GPU})


def _start(
    context: SparkContext, group: str, supervise: SuperviseOnTask, num_ranks: int, server: ControlServer
) -> threading.Thread:
    from pyspark import InheritableThread

    def run() -> None:
        context.setJobGroup(group, f"{num_ranks} training ranks", interruptOnCancel=True)
        try:
            context.parallelize(range(num_ranks), num_ranks).barrier().mapPartitions(supervise).collect()
        except Exception as error:  # py4j's and Spark's errors have no common base; told where the driver waits
            log.info("the barrier stage ended: %s", error)
            server.fail(
                LauncherError(
                    "the barrier stage of the ranks failed",
                    got=_first_line(error),
                    allowed="a stage that lasts as long as its ranks",
                    next_step="Look at the executors' logs: an executor that was lost takes its rank along.",
                )
            )

    thread: threading.Thread = InheritableThread(target=run, name="barrier-stage", daemon=True)
    thread.start()
    return thread


def _end(context: SparkContext, group: str, stage: threading.Thread, limits: Limits) -> None:
    stage.join(2.0)  # all ranks have ended: so do their tasks
    if stage.is_alive():
        with _jvm_lives():
            context.cancelJobGroup(group)
        stage.join(limits.grace_s + 5.0)


@contextmanager
def _jvm_lives() -> Iterator[None]:
    from py4j.protocol import Py4JNetworkError

    try:
        yield
    except (OSError, Py4JNetworkError) as error:
        raise LauncherGoneError(
            "Spark's Java process of this driver has ended",
            got=_first_line(error),
            allowed="a process that lasts as long as its ranks",
            next_step="Look for why it ended (memory?), then start again with the same flags: the run goes on from its "
            "last checkpoint.",
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (causes or lines or [type(error).__name__])[0]
