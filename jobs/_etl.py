"""What the command lines of the ETL jobs share."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from etl.config import DEFAULT_SHARD_BYTES
from jobs._cli import JobParser
from storage.manifest import DatasetManifest


def add_output_flags(job: JobParser, split: str) -> None:
    """The flags that both ETL jobs have."""
    job.add_argument("--input", nargs="+", required=True, metavar="URL", help="files or directories, plain or gzip")
    job.add_argument("--output", required=True, metavar="URL", help="the dataset; must not exist")
    job.add_argument("--max-bad", default="1%", metavar="SHARE", help="largest share of bad records (default 1%%)")
    job.add_argument("--format", default="tfrecord", dest="fmt", metavar="FORMAT", help="tfrecord (default) | parquet")
    job.add_argument("--split", default="80/20", metavar="S", help=f"{split} (default 80/20)")
    job.add_argument(
        "--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, metavar="N", help="bytes of a shard (default 128 MiB)"
    )
    job.add_argument("--seed", type=int, default=0, metavar="N", help="seed of split and order (default 0)")
    job.add_argument("--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])")


def output_values(args: Namespace) -> dict[str, Any]:
    """The fields of OutputConfig that those flags say."""
    names = ("output", "max_bad", "fmt", "split", "shard_bytes", "seed")
    return {"inputs": tuple(args.input), **{name: getattr(args, name) for name in names}}


def summary(manifest: DatasetManifest, output: str) -> str:
    """What was done, in two lines."""
    counts = manifest.counts
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts.dropped.items()) or "0"
    splits = ", ".join(
        f"{name} {split.records} in {len(split.shards)} shards" for name, split in manifest.splits.items()
    )
    return (
        f"{output}: {counts.read} read, {counts.written} written ({splits}),"
        f" {counts.quarantined} quarantined, dropped {dropped}\n"
        f"digest {manifest.digest}"
    )
