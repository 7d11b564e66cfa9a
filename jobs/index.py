"""Add a manifest to TFRecord or Parquet files, or a Delta or Iceberg table, which stay unchanged."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from lockstep.etl.choices import LAKES
from lockstep.jobs._cli import JobParser, names, refuse_idle, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.dataset.indexed import DATA_GLOB, PARQUET_GLOB, SAMPLE_RECORDS
from lockstep.storage.errors import require
from lockstep.storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from lockstep.etl.index.parquet import ParquetIndexConfig

_OF_PARQUET = ("id_columns", "label", "exclude", "schema", "split_by", "table_version")


def parser() -> JobParser:
    """The command line."""
    job = JobParser("index", __doc__ or "", "index")
    add = job.add_argument
    add("url", metavar="URL", help="the directory; it must hold neither _manifest.json nor _index")
    kinds = "tfrecord (default), for Spark to read; parquet, or the files of a delta or iceberg table, as a dataset"
    add("--format", default="tfrecord", choices=["tfrecord", "parquet", *LAKES], help=kinds)
    number = "delta: a version of the table; iceberg: the id of a snapshot (default: the newest)"
    add("--table-version", type=int, metavar="N", help=number)
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
    from lockstep.etl.index.directory import check
    from lockstep.etl.index.parquet import index_parquet
    from lockstep.etl.index.summary import of_dataset, of_files
    from lockstep.etl.index.tfrecord import index_directory

    plain = args.format == "tfrecord"
    for name in _OF_PARQUET if plain else ("sample_records",):
        idle = getattr(args, name) not in (None, ())
        refuse_idle(f"--{name.replace('_', '-')}", idle, f"--format {'parquet' if plain else 'tfrecord'}")
    records = SAMPLE_RECORDS if args.sample_records is None else args.sample_records
    require(records >= 1, "--sample-records", str(records), "1 or more")
    config = None if plain else config_of(args)
    check(args.url, "TFRecord" if plain else "Parquet")
    with nullcontext() if args.master is None else spark_session("lockstep index", args.master) as spark:
        settings = {} if spark is None else hadoop_settings_of(spark)
        set_hadoop_settings(settings)
        if config is not None:
            print(of_dataset(args.url, index_parquet(config, spark=spark, settings=settings)))
            return 0
        glob = args.pattern or DATA_GLOB
        found = index_directory(args.url, pattern=glob, sample_records=records, spark=spark, settings=settings)
        print(of_files(args.url, found))
    return 0


def config_of(args: Namespace) -> ParquetIndexConfig:
    """The configuration of an index of Parquet files."""
    from lockstep.etl.index.parquet import ParquetIndexConfig

    table = None if args.format == "parquet" else args.format
    require(
        table is None or args.pattern is None, "--pattern", str(args.pattern), "without it: the table names its files"
    )
    values = {name: getattr(args, name) for name in ("url", *_OF_PARQUET)}
    return ParquetIndexConfig(**values, pattern=args.pattern or PARQUET_GLOB, table=table)


if __name__ == "__main__":
    run_job(main)
