"""Print what is in a dataset: schema, counts, statistics, leakage, quarantine, or one record; --html writes a page."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.etl.choices import MAX_DESCRIBED_RECORDS
from lockstep.jobs._cli import JobParser, refuse_idle, run_job
from lockstep.jobs._pages import check_page
from lockstep.storage.errors import require
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute


def parser() -> JobParser:
    """The command line."""
    job = JobParser("describe", __doc__ or "", "describe")
    add = job.add_argument
    add(
        "dataset",
        metavar="DATASET",
        help="a path or URL of a dataset, or of a directory that lockstep index has indexed",
    )
    page = "also write a page there, with histograms of each split and sample pictures; replaces only pages of this job"
    add("--html", metavar="FILE", help=page)
    runs = "with --html: link the reports of the runs of this dataset among these runs, or those in these folders"
    add("--runs", nargs="+", default=[], metavar="URL", help=runs)
    most = "read the values of about so many records, spread over each split (default %(default)s)"
    add("--max-records", type=int, default=MAX_DESCRIBED_RECORDS, metavar="N", help=most)
    one = "print only the record of this sample id: 0x and hexadecimal digits as in audits and errors, or the number"
    add("--sample", metavar="ID", help=one)
    add("--picture", metavar="FILE", help="with --sample: write the record's picture to this new PNG file")
    return job


def main(argv: Sequence[str]) -> int:
    """Describe; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.etl.describe.dataset import describe
    from lockstep.etl.describe.page import as_page
    from lockstep.etl.describe.text import as_text, shown
    from lockstep.training.results.runs import read_runs
    from lockstep.training.results.runs_page import reports_of

    page = None if args.html is None else absolute(args.html)
    refuse_idle("--runs", bool(args.runs) and page is None, "--html")
    refuse_idle("--picture", bool(args.picture) and args.sample is None, "--sample")
    if args.sample is not None:
        require(page is None, "--sample", "with --html", "without it: a page is about all records")
        return _print_sample(args.dataset, args.sample, args.picture)
    if page is not None:
        check_page(page, "describe")
    found = describe(args.dataset, args.max_records)
    if page is not None:
        reports = reports_of(absolute(args.dataset), read_runs(args.runs), page) if args.runs else []
        write_file(filesystem(page), page, as_page(found, reports).encode(), exclusive=False)
    print(as_text(found))
    if page is not None:
        print(f"\npage: {shown(page, 500)}")
    return 0


def _print_sample(dataset: str, text: str, picture: str | None) -> int:
    from lockstep.etl.describe.sample import find_sample, sample_id_of
    from lockstep.etl.describe.text import shown

    sample = find_sample(dataset, sample_id_of(text))
    data = None if picture is None else sample.picture()
    print(sample.text())
    if picture is not None and data is not None:
        write_file(filesystem(picture), picture, data)
        print(f"picture: {shown(picture, 500)}")
    return 0


if __name__ == "__main__":
    run_job(main)
