"""A real Airflow under a folder of its own: its processes, which tests kill, and what its database says of tasks."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from PIL import Image

from lockstep.spark.session import ship_rooms
from lockstep.storage.errors import ConfigError, LockstepError
from tests.cluster.daemons import Cluster
from tests.cluster.process import Process, last_lines, spawn
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DAGS = ROOT / "jobs" / "dags"
PYTHON = ROOT / ".venv-airflow" / "bin" / "python"
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
GARMENTS = ROOT / "data" / "fashion-mnist"
SERVERS = ("api-server", "dag-processor", "scheduler")
START_LIMIT_S = 300.0  # 20 s on an idle machine with 2 cores


class Airflow:
    """Airflow with the project's DAGs. `spark_default` is that connection; `lockstep_local` is Spark on this host."""

    def __init__(
        self,
        folder: Path,
        spark_default: Mapping[str, Any],
        more: Mapping[str, str] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self.folder, self._keep = folder.resolve(), keep
        self.processes: dict[str, Process] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.own = {
            "AIRFLOW_HOME": str(self.folder / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", **spark_default}),
            "AIRFLOW_CONN_LOCKSTEP_LOCAL": json.dumps({"conn_type": "spark", "host": "local[1]"}),
            "PYSPARK_PYTHON": sys.executable,
            **(more or {}),
        }

    @property
    def environment(self) -> dict[str, str]:
        """Ours without its own settings of Airflow, Python and pytest. spark-submit is that of this Python."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST", "PYTHON"))}
        folders = [self.own.get("PATH", ""), str(Path(sys.executable).parent), str(PYTHON.parent), os.environ["PATH"]]
        return {**kept, **self.own, "PATH": os.pathsep.join(filter(None, folders))}

    def python(self, *arguments: str, limit_s: float = 400.0) -> str:
        """Run Airflow's Python to its end; returns its output."""
        if not PYTHON.exists():
            raise ConfigError(f"{PYTHON} is missing", next_step="Run `make airflow-venv`; `make test` does.")
        done = subprocess.run(
            [str(PYTHON), *arguments],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip
        output = done.stdout + done.stderr
        if done.returncode != 0:
            raise LockstepError(f"{arguments} ended with {done.returncode}", got=output[-6000:])
        return output

    def command(self, *arguments: str) -> str:
        """Run a command of Airflow's to its end; returns its output."""
        return self.python("-m", "airflow", *arguments)

    def backfill(self, days: Sequence[str], conf: str, *, dag: str = "lockstep_weblog") -> None:
        """Have the scheduler run a DAG for these days, one after the other; `conf` is JSON of params."""
        self.command("dags", "unpause", dag)
        span = ("--from-date", days[0], "--to-date", days[-1], "--max-active-runs", "1")
        more = ("--reprocess-behavior", "failed", "--dag-run-conf", conf)
        self.command("backfill", "create", "--dag-id", dag, *span, *more)

    def start(self, *names: str) -> None:
        """Start these of SERVERS, and return when the API answers that scheduler and DAG processor live."""
        (self.folder / "logs").mkdir(exist_ok=True)
        for name in names:
            command = [str(PYTHON), "-m", "airflow", name]
            self.processes[name] = spawn(name, command, self.environment, self._log(name), keep=self._keep)
        end = time.monotonic() + START_LIMIT_S
        while not self._healthy():
            for name, process in self.processes.items():
                if not process.alive or time.monotonic() > end:
                    ended = f"is not up after {START_LIMIT_S:.0f} s" if process.alive else "ended while it was starting"
                    raise LockstepError(f"{name} {ended}", got=last_lines(self._log(name)), next_step="Read the log.")
            time.sleep(0.5)

    def stop(self) -> None:
        """End all its processes."""
        for process in reversed(list(self.processes.values())):
            process.end(grace_s=10.0)

    def tasks(self, day: str) -> dict[str, tuple[str, int, str]]:
        """Of each task of the run of a day (2026-01-31): state, number of its try, and the id of that try."""
        query = (
            "SELECT t.task_id, t.state, t.try_number, t.id FROM task_instance t JOIN dag_run r USING (dag_id, run_id)"
        )
        database = f"file:{self.folder / 'airflow' / 'airflow.db'}?mode=ro"
        with closing(sqlite3.connect(database, uri=True, timeout=60.0)) as found:
            rows = found.execute(f"{query} WHERE r.data_interval_start LIKE ?", (f"{day}%",)).fetchall()
        return {task: (state, number, str(UUID(name))) for task, state, number, name in rows}

    def wait(self, day: str, limit_s: float) -> dict[str, str]:
        """The state of each task of the run of a day, once none of them can change."""
        found: dict[str, str] = {}

        def ended() -> bool:
            found.update({task: state for task, (state, *_) in self.tasks(day).items()})
            return bool(found) and set(found.values()) <= {"success", "failed", "upstream_failed", "skipped"}

        until(ended, limit_s)
        return found

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/monitor/health", timeout=10) as answer:
                parts = json.load(answer)
        except (OSError, ValueError):
            return False
        return all(parts[name]["status"] == "healthy" for name in ("scheduler", "dag_processor"))


def on_cluster(folder: Path, cluster: Cluster, more: Mapping[str, str] | None = None, *, keep: bool = False) -> Airflow:
    """An Airflow whose `spark_default` is YARN in cluster mode on a cluster of this machine.

    The code travels as a zip. Packages are those of this Python, which each container of this machine finds.
    """
    settings = folder / "spark"
    settings.mkdir(parents=True, exist_ok=True)
    words = [word for word in cluster.submit_conf if "=" in word]
    words += ["spark.driver.memoryOverhead=1g", "spark.yarn.submit.waitAppCompletion=false"]
    words += [f"spark.yarn.appMasterEnv.{name}={cluster.env[name]}" for name in ("JAVA_HOME", "HADOOP_CONF_DIR")]
    lines = [" ".join(word.split("=", 1)) + "\n" for word in words]
    (settings / "spark-defaults.conf").write_text("".join(lines), encoding="utf-8")
    extra = {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": cluster.yarn_url}
    py_files = ship_rooms(str(folder.resolve()))
    own = {**cluster.env, "HDFS": cluster.hdfs_url, "SPARK_CONF_DIR": str(settings)}
    for kind in ("weblog", "images"):
        variable = f"AIRFLOW_VAR_LOCKSTEP_{kind.upper()}"
        own[f"{variable}_PY_FILES"] = py_files
        own[f"{variable}_ROOT"] = f"{cluster.hdfs_url}/nightly/{kind}"
        own[f"{variable}_INPUT"] = str(folder.resolve() / "daily" / kind)
    own |= more or {}
    return Airflow(folder, {"host": "yarn", "extra": extra}, own, keep=keep)


def write_days(folder: Path, days: Sequence[str], lines: int) -> None:
    """A folder for each day, with so many lines of the project's log, each day with the lines after the last one's."""
    with gzip.open(LOG, "rb") as source:
        for day in days:
            (folder / day).mkdir(parents=True, exist_ok=True)
            small = b"".join(source.readline() for _ in range(lines))
            (folder / day / "access.log").write_bytes(small)


def write_images(folder: Path, days: Sequence[str], number: int) -> None:
    """A folder for each day, with so many of the project's garments as CLASS/NUMBER.png, each image on one day."""
    images = np.frombuffer(gzip.decompress((GARMENTS / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((GARMENTS / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    pixels = images.reshape(-1, 28, 28)
    for place in range(len(days) * number):
        target = folder / days[place // number] / f"class-{labels[place]}" / f"{place}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[place]).save(target)
