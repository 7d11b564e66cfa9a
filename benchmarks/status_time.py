"""How long `lockstep status`, `lockstep runs` and `lockstep report` take on a run on HDFS with many rows of metrics.

    python -m benchmarks.status_time [--rows 100000] [--calls 10]

Starts an HDFS of three processes, trains two ranks on it, stops them (SIGTERM), and adds rows to the run's metrics by
the writer of a driver: copies of the run's own rows, for later steps. Then calls each job as a process and prints the
median and the range of its seconds. Only HDFS runs at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from benchmarks.shared.shapes import machine
from lockstep.storage.errors import NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.training.run.metrics import PartWriter, read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import read_status
from tests.cluster.daemons import Cluster
from tests.training._tiny import write_table

WAIT_S = 600.0
ENOUGH_STEPS = 100


def train_and_stop(dataset: str, run: str) -> None:
    """A run that was stopped in good order after some steps."""
    flags = ["--model", "logistic", "--num-ranks", "2", "--global-batch", "8", "--epochs", "100000"]
    command = [
        sys.executable,
        "-m",
        "lockstep.jobs.train",
        "--dataset",
        dataset,
        "--run",
        run,
        *flags,
        "--launcher",
        "local",
    ]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as driver:
        end = time.monotonic() + WAIT_S
        while _steps(run) < ENOUGH_STEPS:
            if driver.poll() is not None or time.monotonic() > end:
                driver.kill()
                log.seek(0)
                sys.exit(f"{log.read()[-3000:]}\nno {ENOUGH_STEPS} steps of {run} within {WAIT_S:.0f} s")
            time.sleep(0.5)
        driver.send_signal(signal.SIGTERM)
        driver.wait(WAIT_S)


def _steps(run: str) -> int:
    try:
        return read_status(filesystem(run), RunPaths(run)).step
    except NotFoundError:
        return 0


def add_rows(run: str, rows: int) -> int:
    """Bring the run's metrics to `rows` rows of steps and of ranks' times; returns the number of parts."""
    history, paths = read_history(run), RunPaths(run)
    own = [*history.steps, *history.times]
    writer = PartWriter(paths.metrics(history.generations), "jsonl")
    first = history.steps[-1]["step"] + 1
    kept = {id(row): {**row, "kind": "step"} for row in history.steps}
    for number, row in enumerate(islice(cycle(own), max(0, rows - len(own)))):
        writer.add(json.dumps({**kept.get(id(row), row), "step": first + number}))
        if writer.due:
            writer.flush()
    writer.flush()
    return len(filesystem(run).list(paths.metrics(history.generations)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=10)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder, "hadoop"))
        try:
            os.environ.update(cluster.start_hdfs().env)
            run = f"{cluster.hdfs_url}/runs/one"
            write_table(f"{cluster.hdfs_url}/data", records={"train": 400, "test": 30})
            train_and_stop(f"{cluster.hdfs_url}/data", run)
            parts = add_rows(run, args.rows)
            about = f"{args.rows:,} rows of metrics in {parts} parts on HDFS, {args.calls} calls each"
            print(f"{machine('hdfs-native')}; {about}")
            for job, url in (("status", run), ("runs", f"{cluster.hdfs_url}/runs"), ("report", run)):
                took, printed = [], ""
                for _ in range(args.calls):
                    began = time.monotonic()
                    command = [sys.executable, "-m", f"lockstep.jobs.{job}", url]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
                    took.append(time.monotonic() - began)
                    printed = done.stdout.strip()
                    if done.returncode:
                        sys.exit(done.stdout + done.stderr)
                print(
                    f"lockstep.jobs.{job}: {statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f})",
                    flush=True,
                )
                print("  " + printed.replace("\n", "\n  "))
        finally:
            cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
