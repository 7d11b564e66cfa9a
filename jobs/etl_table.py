"""Turn a table into a dataset: read by Spark's catalog or a query, split, shard, publish."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lockstep.etl.choices import SPLITS
from lockstep.jobs._cli import JobParser, names, run_job
from lockstep.jobs._etl_flags import add_label_window, add_proposal_flags, add_write_flags, for_embeddings, write_values
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from lockstep.etl.tables import TableConfig


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_table", __doc__ or "", "etl_table")
    add = job.add_argument
    add("--table", metavar="NAME", help="a table or view of the session's catalog: Hive, Iceberg, Delta, JDBC ...")
    add("--query", metavar="SQL", help="a query over such tables")
    add("--input", nargs="+", default=[], metavar="URL", help="files that Spark reads, instead of a table")
    add("--input-format", default="parquet", metavar="F", help="the format of --input, any that Spark knows (parquet)")
    number = "delta, iceberg: the version, or `latest`, whose files are read without the format's jars"
    add("--table-version", metavar="N", help=number)
    add("--id-columns", type=names, default=(), metavar="A,B", help="columns that identify a row; unique together")
    add("--label", metavar="COLUMN", help="the column to predict")
    add("--exclude", type=names, default=(), metavar="A,B", help="columns that are not stored (they may still be ids)")
    header = "with --propose-schema of CSV files without a header: the fields of a line, in order"
    add("--columns", type=names, default=(), metavar="A,B", help=header)
    add("--schema", metavar="FILE", help="a declared schema, TOML or JSON (default: the columns' own types)")
    add_proposal_flags(job, "this table")
    add_write_flags(job, split=SPLITS)
    add_label_window(job, "none")
    return job


def config_of(args: Namespace, given: Collection[str] | None = None) -> TableConfig:
    """The configuration from the flags, with --append-to also from the dataset for those that are not `given`."""
    from lockstep.etl.tables import TableConfig
    from lockstep.jobs._etl import continuing

    values = {
        "table": args.table,
        "query": args.query,
        "inputs": tuple(args.input),
        "input_format": args.input_format,
        "table_version": args.table_version,
        "id_columns": args.id_columns,
        "label": args.label,
        "exclude": args.exclude,
        "columns": args.columns,
        "schema": args.schema,
        "proposes": args.propose_schema,
        **write_values(args),
    }
    return TableConfig(**continuing(values, given))


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = (job := parser()).parse(argv)
    from lockstep.etl import tables
    from lockstep.etl.write.checks import refuse_existing
    from lockstep.jobs._etl import proposed_of_csv, summary

    embeddings = for_embeddings(args, argv)
    config = config_of(args, job.given(argv))
    if args.propose_schema and args.input and args.input_format.lower() == "csv":
        print(proposed_of_csv(config, embeddings=embeddings))
        return 0
    if args.propose_schema:
        refuse_existing(config.output)
        with spark_session("lockstep etl_table", args.master) as spark:
            set_hadoop_settings(hadoop_settings_of(spark))
            print(tables.propose(spark, config, embeddings=embeddings))
        return 0
    plan = tables.check(config)
    with spark_session("lockstep etl_table", args.master) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = tables.run(spark, config, plan)
    print(summary(manifest, args.output))
    return 0


if __name__ == "__main__":
    run_job(main)
