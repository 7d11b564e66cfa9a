"""Say what is in a dataset: schema, counts, sizes, shards, statistics, leakage and quarantine; --html makes a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from etl.describe import MAX_RECORDS, describe
from etl.describe_page import as_page
from etl.describe_text import as_text, shown
from jobs._cli import JobParser, run_job
from storage.fs import absolute, filesystem
from storage.publish import write_file


def parser() -> JobParser:
    """The command line."""
    job = JobParser("describe", __doc__ or "", "describe")
    add = job.add_argument
    add("dataset", metavar="DATASET", help="a path or URL of a dataset, or of a directory that jobs.index has indexed")
    add("--html", metavar="FILE", help="write a page there too, with histograms and sample pictures; replaces a file")
    told = "look at the values of about so many records, from all over each split (default %(default)s)"
    add("--max-records", type=int, default=MAX_RECORDS, metavar="N", help=told)
    return job


def main(argv: Sequence[str]) -> int:
    """Describe; returns the exit code."""
    args = parser().parse(argv)
    found = describe(args.dataset, args.max_records)
    page = None if args.html is None else absolute(args.html)
    if page is not None:
        write_file(filesystem(page), page, as_page(found).encode(), exclusive=False)
    print(as_text(found))
    if page is not None:
        print(f"\npage: {shown(page, 500)}")
    return 0


if __name__ == "__main__":
    run_job(main)
