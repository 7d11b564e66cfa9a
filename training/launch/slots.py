"""Whether a Spark session can hold all ranks at once, told before anything starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError
from training.launch.executors import ranks_of_executor

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOOK_EVERY_S = 1.0


def classic_context(spark: SparkSession) -> SparkContext:
    """The session's SparkContext; raises ConfigError for Spark Connect, whose client has none."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            "ranks cannot be started over Spark Connect",
            got="a Spark Connect session: no SparkContext, and no way from executors to this process' control server",
            allowed="a classic session (local, YARN, Kubernetes, standalone)",
            next_step="Start the job by spark-submit or with --master, without a remote URL; or use --launcher local.",
        )
    return spark.sparkContext


def in_driver(master: str) -> bool:
    """Whether tasks are threads of the driver's own JVM (local, local[N]): no executors, and no GPUs from Spark."""
    return master.startswith("local") and not master.startswith("local-cluster")


def check_slots(
    context: SparkContext, num_ranks: int, wait_s: float, ended: Callable[[], BaseException | None] = lambda: None
) -> None:
    """Raise ConfigError unless `num_ranks` tasks fit at once.

    On a cluster, executors that are still being started are waited for up to `wait_s`, unless what was asked for
    cannot be enough, or `ended()` gives an error to end by: another driver may have taken the run over meanwhile.
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
    end = time.monotonic() + (0.0 if local else wait_s)
    while (slots := slots_now(context)) < num_ranks:
        if (error := ended()) is not None:
            raise error
        asked = settings.get("spark.executor.instances")
        each = ranks_of_executor(settings)
        gpus, per_task = (float(settings.get(f"spark.{of}.resource.gpu.amount", "0")) for of in ("executor", "task"))
        each = min(each, int(gpus / per_task)) if per_task else each
        hopeless = asked is not None and int(asked) * each < num_ranks
        if hopeless or time.monotonic() >= end:
            how = (
                f"give --master 'local[{num_ranks}]'"
                if local
                else "raise --num-executors (spark.executor.instances) or --executor-cores (spark.executor.cores)"
            )
            raise ConfigError(
                f"num_ranks={num_ranks} exceeds the {slots} task slots of this Spark session",
                got=f"{slots} slots on {context.master}",
                allowed="a slot for every rank at once, as a barrier stage needs",
                next_step=f"Lower --num-ranks to {slots} or fewer, or {how}."
                + (f" Each task also takes {per_task:g} of an executor's {gpus:g} GPUs." if per_task else ""),
            )
        time.sleep(LOOK_EVERY_S)


def slots_now(context: SparkContext) -> int:
    """Tasks of one stage that the registered executors can run at once, as Spark's own barrier check counts them."""
    scala = context._jsc.sc()  # neither pyspark nor its Java API has a public accessor for this count
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
