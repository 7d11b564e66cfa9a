"""Write the report of a run, finished or not, as one HTML file: `lockstep report RUN`."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._pages import check_page
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute


def parser() -> JobParser:
    """The command line."""
    found = JobParser("report", __doc__ or "", table="report")
    text = "a local path or hdfs:// URL of a run, finished or not, or of a search of lockstep tune"
    found.add_argument("run", metavar="RUN", help=text)
    text = "write the page there instead of in the run; replaces only pages of this job"
    found.add_argument("--html", metavar="FILE", help=text)
    found.epilog = "Replaces an older report. lockstep train writes one at its end, lockstep pipeline one with an"
    found.epilog += " evaluation. The page of a search is written by lockstep tune; --html copies it."
    return found


def main(argv: Sequence[str]) -> int:
    """Write the report and print its URL; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.results.report import write_report
    from lockstep.training.search.report import search_page
    from lockstep.training.search.search_status import is_search

    run, page = absolute(args.run), None if args.html is None else absolute(args.html)
    fs = filesystem(run)
    search = is_search(fs, run)
    if page is not None:
        check_page(page, "tune" if search else "report")
    print(f"report {search_page(fs, run, page) if search else write_report(run, page=page)}")
    return 0


if __name__ == "__main__":
    run_job(main)
