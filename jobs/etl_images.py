"""Turn image sets into a dataset: read, check, resize, split, shard, publish."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lockstep.etl.choices import SOURCES, STORES
from lockstep.features.images.choices import FIT_WORDS, MAX_PIXELS, ROTATIONS
from lockstep.jobs._cli import JobParser, names, run_job
from lockstep.jobs._etl_flags import add_output_flags, output_values
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from lockstep.etl.images.config import ImagesConfig

OWN = (
    "source", "fit", "rotate", "channels", "store", "num_classes", "image_column", "label_column",
    "image_arrays", "label_arrays", "max_pixels",
)  # fmt: skip


def parser() -> JobParser:
    """The command line."""
    job = JobParser("etl_images", __doc__ or "", "etl_images")
    flag = job.add_argument
    flag("--source", default="idx", metavar="KIND", help=f"{' | '.join(SOURCES)} (default idx); cifar: binary version")
    flag("--image-size", metavar="HxW", help="bring images to this size (default: unchanged; files need it; no HEIC)")
    flag("--fit", default="resize", metavar="HOW", help=f"how they get that size: {FIT_WORDS}")
    flag("--rotate", type=int, default=0, metavar="DEGREES", help=f"turn clockwise: {' | '.join(map(str, ROTATIONS))}")
    flag("--channels", type=int, metavar="N", help="1 grey | 3 RGB (default: as in idx, cifar and npz; 3 for files)")
    stored = f"{' | '.join(STORES)}: pixels (default), or the unchanged files"
    flag("--store", default="pixels", metavar="WHAT", help=stored)
    flag("--num-classes", type=int, metavar="N", help="labels are 0 to N-1 (default 10, cifar100 100, named ones: all)")
    flag("--classes", metavar="A,B,...", help="all classes, also of later data (default: those that are found)")
    flag("--image-column", default="image", metavar="NAME", help="parquet: encoded images, as in image.bytes")
    flag("--label-column", default="label", metavar="NAME", help="parquet: numbers (with --num-classes) or names")
    flag("--image-arrays", type=names, default=(), metavar="A,B", help="npz: arrays of images (default: usual names)")
    flag("--label-arrays", type=names, default=(), metavar="C,D", help="npz: those of their labels, in the same order")
    flag("--max-pixels", type=int, default=MAX_PIXELS, metavar="N", help="larger images are quarantined (default 2^25)")
    add_output_flags(job, split="80/20 | given (files or folders named train..., test...)")
    return job


def config_of(args: Namespace, given: Collection[str] | None = None) -> ImagesConfig:
    """The configuration from the flags, with --append-to also from the dataset for those that are not `given`."""
    from lockstep.etl.images.config import ImagesConfig
    from lockstep.etl.write.config import parse_size
    from lockstep.jobs._etl import continuing

    values = {
        "image_size": None if args.image_size is None else parse_size(args.image_size),
        "classes": None if args.classes is None else tuple(args.classes.split(",")),
        **{name: getattr(args, name) for name in OWN},
        **output_values(args),
    }
    return ImagesConfig(**continuing(values, given))


def main(argv: Sequence[str]) -> int:
    """Run the job; returns the exit code."""
    args = (job := parser()).parse(argv)
    from lockstep.etl.images import job as image_sets
    from lockstep.jobs._etl import finished, summary

    config = config_of(args, job.given(argv))
    if (found := finished(args, config, lambda: image_sets.plan_of(config).sources)) is not None:
        print(summary(found, args.output))
        return 0
    images = image_sets.check(config)
    size = sum(source.size_bytes for source in images.sources)
    with spark_session("lockstep etl_images", args.master, input_bytes=size) as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        manifest = image_sets.run(spark, config, images)
    print(summary(manifest, args.output))
    return 0


if __name__ == "__main__":
    run_job(main)
