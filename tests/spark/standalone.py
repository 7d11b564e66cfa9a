"""A real standalone master of Spark with workers of one core each, on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.cluster.conf import free_ports
from tests.cluster.jars import java_home
from tests.waiting import until

MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


@contextmanager
def standalone(folder: Path, memories: Sequence[str] = ("1g", "1g")) -> Iterator[str]:
    """The URL of a master with a worker for each of `memories`, all registered; all end with the block."""
    port, page = list(free_ports().values())[:2]
    url = f"spark://127.0.0.1:{port}"
    environment = {**os.environ, "JAVA_HOME": str(java_home()), "SPARK_DAEMON_MEMORY": "128m"}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""}
    with ExitStack() as stack:

        def start(name: str, *call: str) -> None:
            log = stack.enter_context(open(folder / "standalone.log", "a"))
            command = [str(Path(pyspark.__file__).parent / "bin/spark-class"), name, "--host", "127.0.0.1", *call]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)  # a worker ends its executors

        def alive() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=10) as answer:
                    return int(json.load(answer)["aliveworkers"]) == len(memories)
            except (OSError, ValueError):  # no page yet
                return False

        start(MASTER, "--port", str(port), "--webui-port", str(page))
        for number, memory in enumerate(memories):
            where = ["--work-dir", str(folder / f"work-{number}"), "--webui-port", "0"]
            start(WORKER, "--cores", "1", "--memory", memory, *where, url)
        until(alive, 120)
        (folder / "page").write_text(str(page))  # the port of the master's page
        yield url
