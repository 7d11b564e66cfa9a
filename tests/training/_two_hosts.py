"""Two loopback addresses with an executor of one slot each, which Spark takes for two hosts.

`python -m tests.training._two_hosts FOLDER PORT|yarn` prints one line of JSON: where ranks ran that avoided hosts, and
what became of a run whose rank lost its executor by SIGKILL in each generation until a host was left out. At PORT it
starts a standalone master and two workers; with `yarn` it starts HDFS, and a YARN of two nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from lockstep.storage.errors import TrainingFailedError
from lockstep.training.control.failures import RankFailedError
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.barrier import OnSpark, check_slots, ranks_on
from lockstep.training.launch.session import Launches
from tests.cluster.daemons import Cluster
from tests.training._ranks import HERE

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("127.0.0.2", "127.0.0.3")
NODES = ("nodemanager", "nodemanager-2")
START_S = 120.0


class TwoNodes(Cluster):
    """A YARN with a node on each of HOSTS, with room for one executor; containers' folders have the host's name."""

    def start_yarn(self) -> TwoNodes:
        self._start_on_free_ports(("resourcemanager", *NODES))
        return self

    def _settings(self, name: str) -> list[str]:
        if name not in NODES:
            return super()._settings(name)
        host = HOSTS[NODES.index(name)]
        settings = {
            "yarn.nodemanager.address": f"{host}:{self.ports[name]}",
            "yarn.nodemanager.localizer.address": f"{host}:{self.ports[name + '-localizer']}",
            "yarn.nodemanager.webapp.address": f"{host}:{self.ports[name + '-http']}",
            "yarn.nodemanager.local-dirs": f"{self.folder}/{host}/local",
            "yarn.nodemanager.log-dirs": f"{self.folder}/{host}/logs",
            "yarn.nodemanager.resource.memory-mb": "3072",
        }
        return [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]


@contextmanager
def on_yarn(folder: Path) -> Iterator[SparkSession]:
    """An executor on each node of a YARN."""
    cluster = TwoNodes(folder / "cluster")
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start_hdfs()
        cluster.start_yarn()
        os.environ.update(cluster.env)
        given = dict(word.split("=", 1) for word in cluster.submit_conf if "=" in word)
        yield stack.enter_context(started("yarn", {**given, "spark.executor.instances": "2"}))


@contextmanager
def started(url: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session with a slot for a task on each host."""
    builder = SparkSession.builder.master(url).appName("two hosts").config("spark.executor.memory", "512m")
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.executorEnv.PYTHONPATH", os.pathsep.join((str(ROOT), HERE)))
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        check_slots(spark.sparkContext, len(HOSTS), START_S)
        yield spark
    finally:
        spark.stop()


@contextmanager
def standalone(folder: Path, port: int) -> Iterator[SparkSession]:
    """A master, a worker on each of HOSTS, and an executor on each."""
    url = f"spark://127.0.0.1:{port}"
    command = [f"{os.environ['SPARK_HOME']}/bin/spark-class"]
    deploy = "org.apache.spark.deploy"
    calls = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]]
    for host in HOSTS:
        worker = [f"{deploy}.worker.Worker", "--host", host, "--cores", "1", "--memory", "1g"]
        calls.append([*worker, "--work-dir", f"{folder}/{host}", "--webui-port", "0", url])
    with ExitStack() as stack:
        log = stack.enter_context((folder / "spark.log").open("w"))
        for call in calls:
            process = subprocess.Popen([*command, *call], stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        yield stack.enter_context(started(url, {}))


def host_of_task(rows: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Each row with the host of its task, whose worker's folder has its name."""
    return iter([(row, next(host for host in HOSTS if host in os.getcwd())) for row in rows])


def avoided(spark: SparkSession, num_ranks: int, *hosts: str) -> list[tuple[int, str]]:
    """Where ranks run that avoid `hosts`."""
    context = spark.sparkContext
    return ranks_on(context, num_ranks, frozenset(hosts)).barrier().mapPartitions(host_of_task).collect()


def run_with_losses(spark: SparkSession) -> dict[str, Any]:
    """Hosts on which generations of one rank failed, what was reported, and where the rank ran after that."""
    failed: list[str] = []
    reports: list[str] = []
    limits = Limits(start_s=START_S, grace_s=1.0)
    with Launches(OnSpark(spark), 1, limits, report=reports.append) as launches:
        for generation in range(1, 6):
            check_slots(spark.sparkContext, len(HOSTS), START_S)
            left_out = any("is left out" in line for line in reports)
            try:
                results = launches.run(RankTask("_ranks:where" if left_out else "_ranks:executor_killed"), generation)
                return {
                    "failed": failed,
                    "reports": reports,
                    "then": next(host for host in HOSTS if host in results[0]["folder"]),
                }
            except RankFailedError as error:
                failed.append(str(error.executor_host))
            except TrainingFailedError as error:  # where Spark counted on the lost one
                failed.append(str(error.__dict__.get("host")))
            time.sleep(1.0)
    raise AssertionError(f"five generations failed: {failed}, {reports}")


def main(folder: Path, where: str) -> None:
    """Print what happened."""
    with on_yarn(folder) if where == "yarn" else standalone(folder, int(where)) as spark:
        told: dict[str, Any] = {
            "one": [[host, avoided(spark, 1, host)] for _ in range(4) for host in HOSTS],
            "two": avoided(spark, 2, HOSTS[0]),
            "no other": avoided(spark, 2, *HOSTS),
            **run_with_losses(spark),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
