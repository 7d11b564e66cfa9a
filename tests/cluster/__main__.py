"""`python -m tests.cluster up|down|status [--dir .cluster]`: what `make cluster` and `make cluster-stop` run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.jobs._cli import run_job
from lockstep.storage.errors import ConfigError, LockstepError
from tests.cluster.daemons import HDFS, YARN, Cluster
from tests.cluster.process import end_all, read_state, write_state

STATE = "cluster.json"
PACKAGE = Path("dist/package.sh")


def write_environment(cluster: Cluster) -> Path:
    """`env.sh` beside the daemons' folders: what a shell needs to use them, to be sourced."""
    arguments = " ".join(cluster.submit_conf)
    values = {**cluster.env, "HDFS": cluster.hdfs_url, "YARN": arguments}
    path = cluster.folder / "env.sh"
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in values.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def drop_package(folder: Path) -> None:
    """Remove what `make package` wrote for the HDFS that this folder had before: spark-submit would look for its
    archives where no NameNode is, and end with a stack trace of Java.
    """
    environment = folder / "env.sh"
    if not (environment.exists() and PACKAGE.exists()):
        return
    before = re.search(r"^export HDFS=(\S+)$", environment.read_text(encoding="utf-8"), re.MULTILINE)
    if before and f"{before[1]}/" in PACKAGE.read_text(encoding="utf-8"):
        PACKAGE.unlink()
        print(f"Removed {PACKAGE}: its archives were on {before[1]}, which is gone. Run `make package URL=...` again.")


def up(folder: Path) -> int:
    """Start an empty HDFS and YARN that outlive this command; tell how to point a shell at them."""
    _, processes = read_state(folder / STATE)
    running = [process for process in processes.values() if process.alive]
    if len(running) == len(HDFS) + len(YARN):
        print(f"The cluster under {folder} runs already.")
        return status(folder)
    if running:
        raise ConfigError(
            f"a part of the cluster under {folder} still runs",
            got=", ".join(f"{process.name} (pid {process.pid})" for process in running),
            allowed="a folder where none runs, or all do",
            next_step="Run `make cluster-stop`, then `make cluster` again.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    drop_package(folder)
    cluster = Cluster(folder, keep=True)
    try:
        print("Starting NameNode and two DataNodes ...", flush=True)
        cluster.start_hdfs()
        print("Starting ResourceManager and NodeManager ...", flush=True)
        cluster.start_yarn()
        write_state(folder / STATE, cluster.ports, cluster.processes.values())
    except BaseException:  # Ctrl-C included: a half-started cluster nobody knows of must not stay
        cluster.stop()
        raise
    return status(folder)


def down(folder: Path) -> int:
    """End just the processes that `up` started here: a pid counts only with the start time that it had then."""
    end_all(folder / STATE, f"No cluster runs under {folder}.")
    return 0


def status(folder: Path) -> int:
    """One line a daemon, then the lines for a shell. Returns 1 where a daemon is missing."""
    ports, processes = read_state(folder / STATE)
    cluster = Cluster(folder)
    cluster.ports = ports
    cluster.processes = processes
    for name in (*HDFS, *YARN):
        process = processes.get(name)
        state = f"pid {process.pid}" if process is not None and process.alive else "not running"
        print(f"  {name:16} {state:14} {cluster.log(name) if process else ''}")
    if not all(cluster.running(name) for name in (*HDFS, *YARN)):
        return 1
    environment = write_environment(cluster)
    arguments = " ".join(shlex.quote(part) for part in cluster.submit_conf)
    print(
        f"""
HDFS {cluster.hdfs_url} (pages at http://127.0.0.1:{ports["namenode-http"]}), YARN {cluster.yarn_url}
Point a shell at them by `source {os.path.relpath(environment)}`, or by hand:

  export HADOOP_CONF_DIR={shlex.quote(cluster.conf_dir)}
  export JAVA_HOME={shlex.quote(cluster.env["JAVA_HOME"])} PYSPARK_PYTHON={shlex.quote(sys.executable)}
  {os.path.dirname(sys.executable)}/spark-submit {arguments} \\
    jobs/doctor.py --hdfs {cluster.hdfs_url}

`make cluster-stop` ends these five processes; what lies on this HDFS is gone with the next `make cluster`."""
    )
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status"])
    parser.add_argument("--dir", default=".cluster", type=Path, help="where configuration, logs and data lie")
    options = parser.parse_args(list(argv))
    folder: Path = options.dir.resolve()
    try:
        return {"up": up, "down": down, "status": status}[options.action](folder)
    except TimeoutError as error:
        raise LockstepError(str(error), next_step="Look at that process by hand.") from error


if __name__ == "__main__":
    run_job(main)
