"""Print what a run is doing now: `python -m jobs.status RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._cli import JobParser, run_job
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute
from training.run.paths import RunPaths
from training.run.status import now_utc, read_status, words


def parser() -> JobParser:
    """The command line."""
    found = JobParser("status", __doc__ or "", table="status")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run")
    found.add_argument("--json", action="store_true", help="print the status as JSON, as RUN/status.json has it")
    found.epilog = "Reads one small file, which the run's driver replaces every 5 s. The exit code is 0 in any state."
    return found


def main(argv: Sequence[str]) -> int:
    """Print the status; returns the exit code."""
    args = parser().parse(argv)
    run = absolute(args.run)
    status = read_status(filesystem(run), RunPaths(run))
    print(status.to_bytes().decode() if args.json else words(status, run, now_utc()))
    return 0


if __name__ == "__main__":
    run_job(main)
