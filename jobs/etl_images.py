"""Turn image sets into a dataset: read, check, resize, split, shard, publish."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path[0] != ROOT:
    sys.path[:1] = [ROOT]

from etl import image_sets
from etl.config import ImagesConfig, parse_size
from jobs._cli import JobParser, run_job
from jobs._etl import add_output_flags, output_values, summary
from jobs._session import hadoop_settings_of, spark_session
from storage.settings import set_hadoop_settings


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_images", __doc__ or "", "etl_images")
    job.add_argument("--source", default="idx", metavar="KIND", help="idx: *-images-idx3-ubyte and *-labels-idx1-ubyte")
    job.add_argument("--image-size", metavar="HxW", help="resize to this height and width (default: as they are)")
    job.add_argument("--num-classes", type=int, default=10, metavar="N", help="labels are 0 to N-1 (default 10)")
    add_output_flags(job, split="80/20 | given (inputs named train-* and t10k-* or test-*)")
    return job


def config_of(args: Namespace) -> ImagesConfig:
    """The configuration that the flags say."""
    return ImagesConfig(
        source=args.source,
        image_size=None if args.image_size is None else parse_size(args.image_size),
        num_classes=args.num_classes,
        **output_values(args),
    )


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = parser().parse(argv)
    config = config_of(args)
    image_sets.check(config)
    with spark_session("lockstep etl_images", args.master) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = image_sets.run(spark, config)
    print(summary(manifest, args.output))
    return 0


if __name__ == "__main__":
    run_job(main)
