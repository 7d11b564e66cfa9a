"""Turn logs into a dataset: parse, quarantine, label, split, shard, publish.

Without --schema the input is the log of a web server: common, combined, w3c (IIS, CloudFront), alb (AWS), or tsv, csv
or json with its columns. With --schema it is any table of records in tsv, csv or json, such as a click log.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lockstep.etl.choices import LABEL_WINDOW_S, LOG_FORMAT_NAMES
from lockstep.jobs import _etl_flags
from lockstep.jobs._cli import JobParser, names, run_job
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from lockstep.etl.logs.config import LogsConfig


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_logs", __doc__ or "", "etl_logs")
    formats = f"{' | '.join(LOG_FORMAT_NAMES)} (default common: the Common Log Format; json: an object a line)"
    job.add_argument("--log-format", default="common", metavar="FORMAT", help=formats)
    web = "visitor, page, query, time, log_end (default: another page within 30 min; NULL in the last 30 of the log)"
    label = f"a SQL expression; NULL leaves a record out. Web logs: a boolean over {web}."
    label += " With --schema: over columns (default: the label's own). With --propose-schema: the column to predict"
    job.add_argument("--label", metavar="EXPR", help=label)
    _etl_flags.add_output_flags(job, split="80/20 | group:COLUMN:80/20")
    further = "--output is a folder of datasets: continue the newest with the input files that none of them has read"
    job.add_argument("--increment", action="store_true", help=further)
    _etl_flags.add_label_window(job, f"{LABEL_WINDOW_S} for the default label, else none")
    _etl_flags.add_web_flags(job)
    job.add_argument("--schema", metavar="FILE", help="a declared schema (.toml, .json; docs/schema.md)")
    places = "with --schema: columns that name a record (default: its file and byte position)"
    job.add_argument("--id-columns", type=names, default=(), metavar="A,B", help=places)
    header = "tsv, csv: the fields of a line in order, where files have no header"
    job.add_argument("--columns", type=names, default=(), metavar="A,B", help=header)
    times = "with --schema: columns in ISO 8601, read as int64 microseconds since 1970 UTC"
    job.add_argument("--time-columns", type=names, default=(), metavar="A,B", help=times)
    nulls = "tsv, csv: texts that mean null besides an empty field, such as NA"
    job.add_argument("--null-text", nargs="+", default=[], metavar="TEXT", help=nulls)
    job.add_argument("--delimiter", metavar="C", help=r"csv: the character between fields (default a comma; \t: a tab)")
    newlines = "csv: newlines inside quotes are part of a record; each file is then read by one task"
    job.add_argument("--quoted-newlines", action="store_true", help=newlines)
    _etl_flags.add_proposal_flags(job, "such a table of unknown columns")
    return job


def config_of(args: Namespace, given: Collection[str] | None = None) -> LogsConfig:
    """The configuration from the flags, with --append-to also from the dataset for those that are not `given`."""
    from lockstep.etl.logs.config import LogsConfig
    from lockstep.etl.write.increment import as_increment
    from lockstep.jobs import _etl

    own = ("log_format", "label", "schema", "id_columns", "columns", "time_columns", "delimiter", "quoted_newlines")
    values = {name: getattr(args, name) for name in own} | {"null_texts": tuple(args.null_text)}
    values |= {**_etl_flags.web_values(args), **_etl_flags.output_values(args)}
    values = as_increment(values) if args.increment else values
    return LogsConfig(**_etl.continuing(values, given))


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = (job := parser()).parse(argv)
    from lockstep.etl.logs import job as logs
    from lockstep.etl.logs.plan import sources_of
    from lockstep.etl.logs.propose import propose
    from lockstep.jobs import _etl

    embeddings = _etl_flags.for_embeddings(args, argv)
    config = config_of(args, job.given(argv))
    if args.propose_schema:
        print(propose(config, embeddings=embeddings))
        return 0
    if (found := _etl.finished(args, config, lambda: sources_of(config))) is not None:
        print(_etl.summary(found, args.output))
        return 0
    plan = logs.check_increment(config) if args.increment else logs.check(config)
    if plan is None:
        print(f"{args.output}: nothing new: all files of --input are in {config.append_to} or before it")
        return 0
    size = sum(source.size_bytes for source in plan.sources)
    with spark_session("lockstep etl_logs", args.master, input_bytes=size) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = logs.run(spark, config, plan)
    print(_etl.summary(manifest, config.output))
    return 0


if __name__ == "__main__":
    run_job(main)
