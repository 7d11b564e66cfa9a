"""Turn a web server's log into a dataset: parse, quarantine, label, split, shard, publish."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from etl import logs
from etl.config import DEFAULT_LABEL, LogsConfig
from jobs._cli import JobParser, run_job
from jobs._etl import add_output_flags, output_values, summary
from jobs._session import hadoop_settings_of, spark_session
from storage.settings import set_hadoop_settings


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_logs", __doc__ or "", "etl_logs")
    job.add_argument("--log-format", default="common", metavar="FORMAT", help="common (Common Log Format)")
    columns = "visitor, page, query, time, log_end; NULL is censored (default: another page within 30 minutes)"
    job.add_argument("--label", default=DEFAULT_LABEL, metavar="EXPR", help=f"a boolean SQL expression over {columns}")
    add_output_flags(job, split="80/20 | group:COLUMN:80/20")
    return job


def config_of(args: Namespace) -> LogsConfig:
    """The configuration that the flags say."""
    return LogsConfig(
        log_format=args.log_format,
        label=args.label,
        **output_values(args),
    )


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = parser().parse(argv)
    config = config_of(args)
    logs.check(config)
    with spark_session("lockstep etl_logs", args.master) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = logs.run(spark, config)
    print(summary(manifest, args.output))
    return 0


if __name__ == "__main__":
    run_job(main)
