"""Write the report of a run, finished or not, as one HTML file: `lockstep report RUN`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.storage.urls import absolute


def parser() -> JobParser:
    """The command line."""
    found = JobParser("report", __doc__ or "", table="report")
    found.add_argument("run", metavar="RUN", help="a local path or hdfs:// URL of a run, finished or not")
    found.epilog = (
        "Replaces an older report. lockstep train writes one at its end, lockstep pipeline one with an evaluation."
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Write the report and print its URL; returns the exit code."""
    run = absolute(parser().parse(argv).run)
    from lockstep.training.results.report import write_report

    print(f"report {write_report(run)}")
    return 0


if __name__ == "__main__":
    run_job(main)
