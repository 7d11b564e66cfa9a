"""Add a manifest to TFRecord or Parquet files of other programs; the files themselves stay unchanged."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext

from lockstep.etl.index.directory import check
from lockstep.etl.index.parquet import PARQUET_GLOB, ParquetIndexConfig, index_parquet
from lockstep.etl.index.summary import of_dataset, of_files
from lockstep.etl.index.tfrecord import index_directory
from lockstep.features.schema.schema import DATA_GLOB, SAMPLE_RECORDS
from lockstep.jobs._cli import JobParser, names, refuse_idle, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.errors import require
from lockstep.storage.settings import set_hadoop_settings

_OF_PARQUET = ("id_columns", "label", "exclude", "schema", "split_by")


def parser() -> JobParser:
    """The command line."""
    job = JobParser("index", __doc__ or "", "index")
    add = job.add_argument
    add("url", metavar="URL", help="the directory; it must hold neither _manifest.json nor _index")
    kinds = "what the files are: tfrecord (default), to be read by Spark; parquet, which become a dataset"
    add("--format", default="tfrecord", choices=["tfrecord", "parquet"], help=kinds)
    pattern = f"names of the files, in any folder (default {DATA_GLOB}, of Parquet {PARQUET_GLOB})"
    add("--pattern", metavar="GLOB", help=pattern)
    sample = "tfrecord: records to look at first for the schema, which is that of all records (default 1000)"
    add("--sample-records", type=int, metavar="N", help=sample)
    ids = "parquet: columns that identify a row, unique together (default: the file's path and the row's number)"
    add("--id-columns", type=names, default=(), metavar="A,B", help=ids)
    add("--label", metavar="COLUMN", help="parquet: the column to predict")
    add("--exclude", type=names, default=(), metavar="A,B", help="parquet: columns that are not read")
    add("--schema", metavar="FILE", help="parquet: a declared schema, TOML or JSON (default: the columns' own types)")
    add("--split-by", metavar="NAME", help="parquet: the partition (folders NAME=VALUE) whose values name the splits")
    add("--master", metavar="URL", help="Spark master: one task a file; without it this process reads one by one")
    return job


def main(argv: Sequence[str]) -> int:
    """Index; returns the exit code."""
    args = parser().parse(argv)
    parquet = args.format == "parquet"
    for name in ("sample_records",) if parquet else _OF_PARQUET:
        refuse_idle(
            f"--{name.replace('_', '-')}", bool(getattr(args, name)), f"--format {'tfrecord' if parquet else 'parquet'}"
        )
    records = SAMPLE_RECORDS if args.sample_records is None else args.sample_records
    require(records >= 1, "--sample-records", str(records), "1 or more")
    check(args.url, "Parquet" if parquet else "TFRecord")
    with nullcontext() if args.master is None else spark_session("lockstep index", args.master) as spark:
        settings = {} if spark is None else hadoop_settings_of(spark)
        set_hadoop_settings(settings)
        if parquet:
            manifest = index_parquet(config_of(args), spark=spark, settings=settings)
            print(of_dataset(args.url, manifest))
            return 0
        pattern = args.pattern or DATA_GLOB
        print(
            of_files(
                args.url,
                index_directory(args.url, pattern=pattern, sample_records=records, spark=spark, settings=settings),
            )
        )
    return 0


def config_of(args: Namespace) -> ParquetIndexConfig:
    """The configuration of an index of Parquet files."""
    values = {name: getattr(args, name) for name in ("url", *_OF_PARQUET)}
    return ParquetIndexConfig(**values, pattern=args.pattern or PARQUET_GLOB)


if __name__ == "__main__":
    run_job(main)
