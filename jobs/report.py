"""Write the report of a run, finished or not, as one HTML file: `python -m jobs.report RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from jobs._cli import JobParser, run_job
from lockstep.storage.urls import absolute
from training.results.report import write_report


def parser() -> JobParser:
    """The command line."""
    found = JobParser("report", __doc__ or "", table="report")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run, finished or not")
    found.epilog = "Replaces an older report. jobs.train writes one at its end, jobs.pipeline one with an evaluation."
    return found


def main(argv: Sequence[str]) -> int:
    """Write the report and print its URL; returns the exit code."""
    print(f"report {write_report(absolute(parser().parse(argv).run))}")
    return 0


if __name__ == "__main__":
    run_job(main)
