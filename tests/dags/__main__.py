"""`python -m tests.dags up|down [--dir .airflow]`: what `make airflow` and `make airflow-stop` run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from lockstep.jobs._cli import run_job
from lockstep.storage.errors import ConfigError
from tests.cluster.__main__ import STATE as OF_CLUSTER
from tests.cluster.daemons import HDFS, YARN, Cluster
from tests.cluster.process import end_all, read_state, write_state
from tests.dags._airflow import DAGS, PYTHON, SERVERS, on_cluster, write_days, write_images

STATE = "airflow.json"


def up(folder: Path, of_cluster: Path) -> int:
    """Start an Airflow without any runs that outlives this command, on the cluster of `make cluster`."""
    ports, processes = read_state(of_cluster / OF_CLUSTER)
    if not all(name in processes and processes[name].alive for name in (*HDFS, *YARN)):
        raise ConfigError(
            "the DAGs need HDFS and YARN", got=f"no cluster under {of_cluster}", allowed="a cluster that runs",
            next_step="Run `make cluster`, then `make airflow` again.",
        )  # fmt: skip
    _, running = read_state(folder / STATE)
    if any(process.alive for process in running.values()):
        raise ConfigError(
            f"an Airflow runs already under {folder}",
            got=", ".join(f"{process.name} (pid {process.pid})" for process in running.values() if process.alive),
            allowed="a folder where none runs", next_step="Run `make airflow-stop` first.",
        )  # fmt: skip
    cluster = Cluster(of_cluster)
    cluster.ports = ports
    airflow = on_cluster(folder, cluster, keep=True)
    days = [(datetime.now(UTC) - timedelta(days=ago)).strftime("%Y-%m-%d") for ago in (2, 1)]
    write_days(folder / "daily" / "weblog", days, 4000)
    write_images(folder / "daily" / "images", days, 1000)
    print("Making Airflow's database ...", flush=True)
    shutil.rmtree(folder / "airflow", ignore_errors=True)  # of an earlier one: that cluster's HDFS is gone
    airflow.command("db", "migrate")
    print("Starting API server, DAG processor and scheduler ...", flush=True)
    try:
        airflow.start(*SERVERS)
    finally:
        write_state(folder / STATE, {"api-server": airflow.port}, airflow.processes.values())
    told = {**airflow.own, "PATH": f"{Path(sys.executable).parent}:{PYTHON.parent}"}
    lines = [f"export {name}={shlex.quote(text)}\n" for name, text in told.items() if name != "PATH"]
    (folder / "env.sh").touch(mode=0o600)  # it holds the secret of this Airflow
    (folder / "env.sh").write_text("".join([*lines, f'export PATH="{told["PATH"]}:$PATH"\n']), encoding="utf-8")
    print(f"""
Airflow {airflow.url} (no password, this machine only), DAGs of {os.path.relpath(DAGS)}
Logs and images of {days[0]} and {days[1]}: {os.path.relpath(folder / "daily")}; results: {cluster.hdfs_url}/nightly
Point a shell at it by `source {os.path.relpath(folder / "env.sh")}`; `make airflow-stop` ends its three processes.""")
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dags", description=__doc__)
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument("--dir", default=".airflow", type=Path, help="where database, logs and days of input lie")
    parser.add_argument("--cluster", default=".cluster", type=Path, help="the folder of `make cluster`")
    options = parser.parse_args(list(argv))
    folder: Path = options.dir.resolve()
    if options.action == "down":
        end_all(folder / STATE, f"No Airflow runs under {folder}.")
        return 0
    return up(folder, options.cluster.resolve())


if __name__ == "__main__":
    run_job(main)
