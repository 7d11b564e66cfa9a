"""List runs with their state and metrics, compare their configurations, and write a page of their curves."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.jobs._cli import JobParser, run_job
from lockstep.jobs._pages import check_page
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute


def parser() -> JobParser:
    """The command line."""
    job = JobParser("runs", __doc__ or "", "runs")
    add = job.add_argument
    add("urls", nargs="+", metavar="URL", help="a run, or a folder that holds runs, such as a search of lockstep tune")
    text = "only runs of which this is true; KEY is a metric, a column or an option of lockstep train (set.NAME of a "
    text += "model's setting), `=` may be !=, >=, <=, > or <, in quotes"
    add("--where", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)
    text = "the best first (default direction: min of errors and losses, else max); without this flag the oldest first"
    add("--sort", metavar="METRIC[:max|min]", help=text)
    add("--compare", action="store_true", help="also print the options that differ, and all metrics")
    add("--html", metavar="FILE", help="also write a page there; replaces only pages of this job")
    job.epilog = "A run that cannot be read is a line that says why. The job changes no run."
    return job


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.training.results.runs import as_text, comparison, filtered, listing, ordered, read_runs
    from lockstep.training.results.runs_page import runs_page

    page = None if args.html is None else absolute(args.html)
    if page is not None:
        check_page(page, "runs")
    found = read_runs(args.urls)
    runs = filtered(found, args.where)
    if args.sort is not None and runs:
        runs = ordered(runs, args.sort)
    print(as_text(listing(runs, args.sort or "")) if runs else f"none of {len(found)} runs meets all conditions")
    if args.compare and runs:
        print(f"\n{as_text(comparison(runs))}")
    if page is not None:
        where = "; ".join([*args.urls, *args.where, *([f"by {args.sort}"] if args.sort else [])])
        write_file(filesystem(page), page, runs_page(runs, where, page, args.sort or "").encode(), exclusive=False)
        print(f"\npage: {page}")
    return 0


if __name__ == "__main__":
    run_job(main)
