"""Print where every thread of every rank of a run is: `lockstep stacks RUN`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute
from lockstep.training.run import requests
from lockstep.training.run.paths import RunPaths


def parser() -> JobParser:
    """The command line."""
    found = JobParser("stacks", __doc__ or "", table="stacks")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run that trains")
    found.add_argument("--within", dest="within_s", type=float, default=60.0, metavar="S", help="wait at most so long")
    found.epilog = "Ranks that hang in native code answer too. The stacks are also added to the ranks' logs."
    return found


def main(argv: Sequence[str]) -> int:
    """Print the stacks, the most recent call first; returns the exit code."""
    args = parser().parse(argv)
    run = absolute(args.run)
    print(requests.ask(filesystem(run), RunPaths(run), requests.STACKS, args.within_s))
    return 0


if __name__ == "__main__":
    run_job(main)
