"""Turn a web server's log into a dataset: parse, quarantine, label, split, shard, publish."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from etl import logs
from etl.config import DEFAULT_LABEL, DEFAULT_SHARD_BYTES, LogsConfig
from jobs._cli import JobParser, run_job
from jobs._session import hadoop_settings_of, spark_session
from storage.manifest import DatasetManifest
from storage.settings import set_hadoop_settings


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_logs", __doc__ or "", "etl_logs")
    job.add_argument("--log-format", default="common", metavar="FORMAT", help="common (Common Log Format)")
    job.add_argument("--label", default=DEFAULT_LABEL, metavar="EXPR", help="a boolean SQL expression over visitor, page, query, time, log_end; NULL is censored")
    add_output_flags(job, split="80/20 | group:COLUMN:80/20")
    return job


def add_output_flags(job: JobParser, split: str) -> None:
    """The flags that both ETL jobs have."""
    job.add_argument("--input", nargs="+", required=True, metavar="URL", help="files or directories, plain or gzip")
    job.add_argument("--output", required=True, metavar="URL", help="the dataset; must not exist")
    job.add_argument("--max-bad", default="1%", metavar="SHARE", help="largest share of bad records (default 1%%)")
    job.add_argument("--format", default="tfrecord", dest="fmt", metavar="FORMAT", help="tfrecord (default) | parquet")
    job.add_argument("--split", default="80/20", metavar="S", help=f"{split} (default 80/20)")
    job.add_argument("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, metavar="N", help="bytes of a shard (default 128 MiB)")
    job.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split and order (default 0)")
    job.add_argument("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")


def summary(manifest: DatasetManifest, output: str) -> str:
    """What was done, in two lines."""
    counts = manifest.counts
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts.dropped.items()) or "0"
    splits = ", ".join(f"{name} {split.records} in {len(split.shards)} shards" for name, split in manifest.splits.items())
    return (
        f"{output}: {counts.read} read, {counts.written} written ({splits}), {counts.quarantined} quarantined, dropped {dropped}\n"
        f"digest {manifest.digest}"
    )


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = parser().parse(argv)
    config = LogsConfig(
        inputs=tuple(args.input),
        output=args.output,
        log_format=args.log_format,
        label=args.label,
        max_bad=args.max_bad,
        fmt=args.fmt,
        split=args.split,
        shard_bytes=args.shard_bytes,
        seed=args.seed,
    )
    logs.check(config)
    with spark_session("lockstep etl_logs", args.master) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = logs.run(spark, config)
    print(summary(manifest, args.output))
    return 0


if __name__ == "__main__":
    run_job(main)
