"""Ask the driver of a run for a checkpoint, or to stop: `lockstep control RUN checkpoint|stop`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute
from lockstep.training.run import requests
from lockstep.training.run.paths import RunPaths


def parser() -> JobParser:
    """The command line."""
    found = JobParser("control", __doc__ or "", table="control")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run that trains")
    found.add_argument("request", choices=(requests.CHECKPOINT, requests.STOP), help="what to ask for")
    found.add_argument("--within", dest="within_s", type=float, default=120.0, metavar="S", help="wait at most so long")
    found.epilog = (
        "From any machine that can write RUN. `checkpoint` returns when it is committed; `stop` has the ranks write a "
        "checkpoint and end, after which the same lockstep train call resumes (exit code 75)."
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Ask, and print the answer; returns the exit code."""
    args = parser().parse(argv)
    run = absolute(args.run)
    print(requests.ask(filesystem(run), RunPaths(run), args.request, args.within_s))
    return 0


if __name__ == "__main__":
    run_job(main)
