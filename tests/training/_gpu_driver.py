"""A driver with GPUs that are none: two standalone workers whose discovery script hands out one number each.

`python -m tests.training._gpu_driver FOLDER` prints one line of JSON: what each rank was told to see, the error of one
rank too many, and how the ranks were started again after an executor was killed. With AMOUNT RANKS after it, there is
one worker of two cores with as many whole GPUs as one task needs, a task takes AMOUNT (or `none`), and no executor is
killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from lockstep.storage.errors import ConfigError, TrainingFailedError
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.launch.session import Launches
from tests.training._ranks import HERE

ROOT = Path(__file__).resolve().parents[2]
BOTH = """#!/bin/sh
echo '{"name": "gpu", "addresses": ["3", "5"]}'
"""
ONE = BOTH.replace(', "5"', "")
DISCOVERY = """#!/bin/sh
# The first worker that asks has GPU 3, the second GPU 5.
cd {folder} || exit 1
for number in 3 5; do mkdir $number 2>/dev/null && break; done
echo '{{"name": "gpu", "addresses": ["'$number'"]}}'
"""


@contextmanager
def session(
    folder: Path, *, discovery: str, workers: str = "2,1", gpus: str = "1", amount: str = "1", **environment: str
) -> Iterator[SparkSession]:
    """Workers and cores of each, an executor each, `gpus` GPUs each, of which each task takes `amount`."""
    folder.mkdir()
    script = folder / "gpus"
    script.write_text(discovery)
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": gpus,
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": gpus,
        **({"spark.task.resource.gpu.amount": amount} if amount != "none" else {}),
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join((str(ROOT), HERE)),
        **{f"spark.executorEnv.{name}": value for name, value in environment.items()},
    }
    builder = SparkSession.builder.master(f"local-cluster[{workers},1024]").appName("gpus")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def seen(spark: SparkSession, num_ranks: int, start_s: float = 300.0) -> list[dict[str, str]]:
    """What CUDA's variables say in each rank."""
    limits = Limits(start_s=start_s, grace_s=1.0)
    results = OnSpark(spark)(RankTask("_ranks:hello"), num_ranks, limits=limits, handler=Handler(lambda *_: {}))
    lines = [dict(line.split("=", 1) for line in result["environment"]) for result in results]
    return [{name: value for name, value in line.items() if name.startswith("CUDA_")} for line in lines]


def lost_executor(spark: SparkSession) -> tuple[list[int], list[dict[str, Any]], str]:
    """An executor is killed: the levels of the restarts, what the next generation returned, and the first error."""
    task, errors = RankTask("_ranks:executor_killed_once"), list[str]()
    with Launches(OnSpark(spark), 2, Limits(start_s=300.0, grace_s=1.0)) as launches:
        for generation in range(1, 6):
            try:
                results = launches.run(task, generation)
                return [restart.level for restart in launches.restarts], results, errors[0]
            except TrainingFailedError as error:  # of a later one, too, where it counts on the lost one
                errors.append(str(error))
    raise AssertionError(f"five generations failed: {launches.restarts}")


def main(folder: Path) -> None:
    """The executors' own list, as a cluster's owner may set it, has both GPUs: each rank sees the one of its task."""
    with session(folder, discovery=DISCOVERY.format(folder=folder), CUDA_VISIBLE_DEVICES="5,3") as spark:
        told: dict[str, Any] = {"seen": seen(spark, 2), "too many": too_many(spark, 3)}
        told["levels"], told["results"], told["lost"] = lost_executor(spark)
    print(json.dumps(told))


def too_many(spark: SparkSession, ranks: int) -> str:
    """The error of so many ranks."""
    try:
        return f"ran: {seen(spark, ranks, start_s=1.0)}"
    except ConfigError as error:
        return str(error)


def of_amount(folder: Path, amount: str, ranks: int) -> None:
    """Ranks on one executor, of which each takes `amount` GPUs, and one rank more."""
    whole = 1 if amount == "none" else max(1, int(float(amount)))
    with session(folder, discovery=BOTH if whole > 1 else ONE, workers="1,2", gpus=str(whole), amount=amount) as spark:
        told = {"seen": seen(spark, ranks), "too many": too_many(spark, ranks + 1)}
        print(
            json.dumps(told | {"other tasks": spark.sparkContext.parallelize(range(2), 2).map(gpus_of_task).collect()})
        )


def gpus_of_task(row: int) -> list[str]:
    """The GPUs of a task that is no rank."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    gpu = context.resources().get("gpu")
    return list(gpu.addresses) if gpu else []


if __name__ == "__main__":
    if sys.argv[2:]:
        of_amount(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
