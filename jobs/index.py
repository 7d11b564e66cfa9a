"""Add a manifest and offset indexes to TFRecord files of other programs; the files themselves stay unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from lockstep.jobs._cli import JobParser, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.dataset.indexed import DATA_GLOB, SAMPLE_RECORDS, IndexedManifest
from lockstep.storage.errors import require
from lockstep.storage.settings import set_hadoop_settings


def parser() -> JobParser:
    """The command line."""
    job = JobParser("index", __doc__ or "", "index")
    add = job.add_argument
    add("url", metavar="URL", help="the directory; it must hold neither _manifest.json nor _index")
    add("--format", default="tfrecord", choices=["tfrecord"], help="what the files are (default tfrecord)")
    add("--pattern", default=DATA_GLOB, metavar="GLOB", help="names of the files, in any folder (default %(default)s)")
    sample = "records to look at first for the schema, which is that of all records (default %(default)s)"
    add("--sample-records", type=int, default=SAMPLE_RECORDS, metavar="N", help=sample)
    add("--master", metavar="URL", help="Spark master: one task a file; without it this process reads one by one")
    return job


def main(argv: Sequence[str]) -> int:
    """Index; returns the exit code."""
    args = parser().parse(argv)
    from lockstep.etl.index import check, index_directory

    require(args.sample_records >= 1, "--sample-records", str(args.sample_records), "1 or more")
    check(args.url)
    with nullcontext() if args.master is None else spark_session("lockstep index", args.master) as spark:
        settings = {} if spark is None else hadoop_settings_of(spark)
        set_hadoop_settings(settings)
        manifest = index_directory(
            args.url, pattern=args.pattern, sample_records=args.sample_records, spark=spark, settings=settings
        )
    print(_summary(args.url, manifest))
    return 0


def _summary(url: str, manifest: IndexedManifest) -> str:
    """Files, records and bytes, and a line for each column."""
    records = sum(file.records for file in manifest.files)
    size = sum(file.bytes for file in manifest.files)
    lines = [f"{url}: {len(manifest.files)} files, {records} records, {size} bytes"]
    lines += [f"  {name}: {f'list of {dtype}' if many else dtype}" for name, dtype, many in manifest.columns]
    return "\n".join([*lines, f"schema from {manifest.sampled} records; read it by spark.read.format('tfrecord')"])


if __name__ == "__main__":
    run_job(main)
