"""From IDX image sets to a dataset of pixels and labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etl import columns as c
from etl.config import ImagesConfig
from etl.digest import digest_sources
from etl.idx import IdxFile, read_header
from etl.parse_images import BAD, OUTPUT_DDL, PAIR_DDL, RECORD, ParseImages
from etl.quality import check_bad
from etl.ranges import Source, find_sources, source_name
from etl.session import tuned
from etl.spark_errors import translated
from etl.watch import watched
from etl.write import Origin, refuse_existing, write_dataset
from features.schema import Field, Schema, sample_id_field
from storage.errors import ConfigError, DataError, NotFoundError
from storage.fs import absolute, parent
from storage.manifest import DatasetManifest
from storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ID_COLUMNS = ("name", "number")
_KIND = re.compile(r"(images|labels)(.*?)idx\d")
_GIVEN = {"train": "train", "t10k": "test", "test": "test"}


@dataclass(frozen=True, slots=True)
class Pair:
    """An image file and its label file, by their places among the sources, and the split that their name gives."""

    images: IdxFile
    labels: IdxFile
    images_source: int
    labels_source: int
    occurrence: int
    split: str | None


def check(config: ImagesConfig) -> tuple[list[Source], list[Pair]]:
    """What can be checked before Spark starts: the output, the files, their names, headers and lengths."""
    refuse_existing(config.output)
    if config.split_spec.column is not None:
        raise ConfigError(
            "images have no column to group by",
            got=config.split,
            allowed="80/20 or given",
            next_step="Correct --split.",
        )
    sources = find_sources(config.inputs)
    return sources, _pairs(sources, config.split_spec.given)


def schema(shape: tuple[int, ...], num_classes: int) -> Schema:
    """The fields of an image set's dataset: the pixels as (height, width, channels) uint8 and the class."""
    return Schema(
        (
            sample_id_field(),
            Field(name="image", dtype="uint8", shape=shape),
            Field(name="label", dtype="int64", kind="label", num_classes=num_classes),
        )
    )


def run(spark: SparkSession, config: ImagesConfig) -> DatasetManifest:
    """Read, resize, split and publish. Raises the errors of check, and DataError where files are not what they say."""
    sources, pairs = check(config)
    old = pairs[0].images.shape[1:]
    size = config.image_size or old[:2]
    shape = (*size, *(old[2:] or (1,)))
    with translated(spark, "reading the images"), tuned(spark, sources), watched(spark, "etl images"):
        rows = _ranges(pairs, config.split_bytes)
        planned = spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), PAIR_DDL)
        parsed = planned.mapInArrow(ParseImages(hadoop_settings(), size, config.num_classes), OUTPUT_DDL).persist()
        try:
            counts = {row["kind"]: (row["n"], row["bytes"]) for row in _counts(parsed)}
            bad, bad_bytes = counts.get(BAD, (0, 0))
            read = bad + counts.get(RECORD, (0, 0))[0]
            # The headers promise so many records and each task checks its own: a second way to the same number.
            assert read == sum(pair.images.shape[0] for pair in pairs), f"{read} records came of the files' own counts"
            quarantine = (
                parsed.where(f"kind = {BAD}")
                .withColumnRenamed(c.SOURCE, "source")
                .withColumnRenamed(c.POSITION, "position")
            )
            check_bad(quarantine, [s.url for s in sources], bad, read, config.max_bad_share, config.max_bad)
            origin = Origin(
                sources=digest_sources(spark, sources),
                read=read,
                quarantined=bad,
                quarantined_raw_bytes=bad_bytes,
                quarantine=quarantine,
                created_config=config.to_json(),
            )
            return write_dataset(
                parsed.where(f"kind = {RECORD}"),
                config.output,
                schema=schema(shape, config.num_classes),
                id_columns=ID_COLUMNS,
                fmt=config.fmt,
                split=config.split_spec,
                shard_bytes=config.shard_bytes,
                seed=config.seed,
                origin=origin,
            )
        finally:
            parsed.unpersist()


def _counts(parsed: DataFrame) -> Sequence[dict[str, int]]:
    found = parsed.groupBy("kind").agg({"*": "count", "length": "sum"}).collect()
    return [{"kind": row["kind"], "n": row["count(1)"], "bytes": row["sum(length)"] or 0} for row in found]


def _pairs(sources: Sequence[Source], given: bool) -> list[Pair]:
    found: dict[tuple[str, str], dict[str, int]] = {}
    for number, source in enumerate(sources):
        name = source_name(source.url)
        kind = _KIND.search(name)
        if kind is None:
            raise ConfigError(
                f"input {source.url} is not named like an IDX file",
                got=name,
                allowed="*images*idx3* and *labels*idx1*, plain or .gz",
                next_step="Name the files as MNIST does, or leave this one out.",
            )
        key = (parent(source.url), _KIND.sub(r"*\2idx", name))
        if kind.group(1) in found.setdefault(key, {}):
            raise ConfigError(
                f"input {source.url} is there twice",
                got="the same name plain and packed, or given twice",
                allowed="one of them",
                next_step="Take one of them out.",
            )
        found[key][kind.group(1)] = number
    pairs: list[Pair] = []
    seen: Counter[str] = Counter()
    for numbers in found.values():
        pair = _pair(sources, numbers, given, seen)
        if pairs and pairs[0].images.shape[1:] != pair.images.shape[1:]:
            raise DataError(
                f"{pair.images.url} holds images of another size",
                got=str(pair.images.shape[1:]),
                allowed=f"{pairs[0].images.shape[1:]} as in {pairs[0].images.url}",
                next_step="Build a dataset from each.",
            )
        pairs.append(pair)
    return pairs


def _pair(sources: Sequence[Source], numbers: dict[str, int], given: bool, seen: Counter[str]) -> Pair:
    if len(numbers) < 2:
        there = sources[next(iter(numbers.values()))].url
        missing = "labels" if "images" in numbers else "images"
        raise NotFoundError(
            f"input {there} has no file of {missing}",
            got="one file of a pair",
            allowed="images and labels in one folder, named alike",
            next_step="Give --input both files, or their folder.",
        )
    images, labels = (read_header(sources[numbers[kind]]) for kind in ("images", "labels"))
    for file, dimensions in ((images, (3, 4)), (labels, (1,))):
        if len(file.shape) not in dimensions:
            raise DataError(
                f"{file.url} has the wrong number of dimensions",
                got=str(file.shape),
                allowed=" or ".join(map(str, dimensions)),
                next_step="Check which file holds images and which labels.",
            )
    if images.shape[0] != labels.shape[0]:
        raise DataError(
            f"{images.url} and {labels.url} do not belong together",
            got=f"{images.shape[0]} images, {labels.shape[0]} labels",
            allowed="a label for each image",
            next_step="Fetch both files again from one origin.",
        )
    name = source_name(images.url)
    seen[name] += 1
    split = _GIVEN.get(re.split(r"[-_.]", name)[0])
    if given and split is None:
        raise ConfigError(
            f"{images.url} does not name its split",
            got=name,
            allowed="train-*, t10k-* or test-*",
            next_step="Use --split 80/20.",
        )
    return Pair(images, labels, numbers["images"], numbers["labels"], seen[name] - 1, split if given else None)


def _ranges(pairs: Sequence[Pair], split_bytes: int) -> list[tuple[object, ...]]:
    """Rows of PAIR_DDL: a gzip file of images is one range, a plain one is cut after about `split_bytes` bytes."""
    rows: list[tuple[object, ...]] = []
    for pair in pairs:
        images, labels = pair.images, pair.labels
        step = images.shape[0] if images.codec == "gzip" else max(1, split_bytes // images.record_bytes)
        for first in range(0, images.shape[0], step):
            count = min(step, images.shape[0] - first)
            files = (
                absolute(images.url),
                images.codec,
                list(images.shape),
                pair.images_source,
                absolute(labels.url),
                labels.codec,
                pair.labels_source,
            )
            rows.append((*files, source_name(images.url), pair.occurrence, pair.split, first, count))
    return rows
