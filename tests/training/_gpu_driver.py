"""A driver with GPUs that are none: two standalone workers whose discovery script hands out one number each.

`python -m tests.training._gpu_driver FOLDER` prints one line of JSON: what each rank was told to see, the error of one
rank too many, and how the ranks were started again after an executor was killed.
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
from tests.training._ranks import HERE
from training.control.server import Handler
from training.control.task import Limits, RankTask
from training.launch.barrier import OnSpark, run_barrier
from training.launch.session import Launches

ROOT = Path(__file__).resolve().parents[2]
DISCOVERY = """#!/bin/sh
# The first worker that asks has GPU 3, the second GPU 5.
cd {folder} || exit 1
for number in 3 5; do mkdir $number 2>/dev/null && break; done
echo '{{"name": "gpu", "addresses": ["'$number'"]}}'
"""


@contextmanager
def session(folder: Path, **environment: str) -> Iterator[SparkSession]:
    """Two workers, an executor each, a GPU each."""
    folder.mkdir()
    script = folder / "gpus"
    script.write_text(DISCOVERY.format(folder=folder))
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join((str(ROOT), HERE)),
        **{f"spark.executorEnv.{name}": value for name, value in environment.items()},
    }
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("gpus")
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
    results = run_barrier(spark, RankTask("_ranks:hello"), num_ranks, limits=limits, handler=Handler(lambda *_: {}))
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
    with session(folder, CUDA_VISIBLE_DEVICES="5,3") as spark:
        told: dict[str, Any] = {"seen": seen(spark, 2)}
        try:
            told["too many"] = f"ran: {seen(spark, 3, start_s=1.0)}"
        except ConfigError as error:
            told["too many"] = str(error)
        told["levels"], told["results"], told["lost"] = lost_executor(spark)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
