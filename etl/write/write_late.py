"""The driver's half of images that are made late: their shards, and what turned out broken while they were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from etl import columns as c
from etl.images.image_rows import PACKED, PLACE
from etl.spark.session import described
from etl.spark.tasks import mapped
from etl.split.leakage import CONTENT, checks_of
from etl.split.splits import SplitSpec
from etl.write.beside import Origin
from etl.write.late import WRITTEN_DDL, LateImages, WriteLate
from etl.write.place import ordered, placed
from etl.write.shards import ShardTable, WriteShards
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.dataset.manifest_shards import SplitInfo
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import FileSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


@dataclass(frozen=True)
class Late:
    """Images that are made late. `check` is asked before anything is published whether an origin with all that was
    rejected will do, and raises DataError where not.
    """

    images: LateImages
    check: Callable[[Origin], None]


@dataclass(frozen=True)
class Written:
    """Shards and their indexes; the origin with what was rejected on the way; and `rows`, an id, split and leak key for
    each record.
    """

    splits: dict[str, SplitInfo]
    files: dict[str, FileInfo]
    origin: Origin
    rows: DataFrame


def has_late_content(split: SplitSpec, schema: Schema) -> bool:
    """Whether the leak key is a hash of the pixels, which nobody has before they are made."""
    return CONTENT in checks_of(split, schema)


def write_late(
    fs: FileSystem,
    paths: DatasetPaths,
    rows: DataFrame,
    table: ShardTable,
    write: WriteShards,
    late: Late,
    origin: Origin,
    stack: ExitStack,
) -> Written:
    """Make the images of `rows` (AssignLate's, with images), write them and move each shard and index to its place.

    What the tasks told stays cached until `stack` ends. Raises DataError where a split has only broken images, and
    what `late.check` raises.
    """
    carried = [field.name for field in write.schema if field.name != SAMPLE_ID]
    columns = (c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID, c.LEAK, PACKED, PLACE, *carried)
    task = WriteLate(write, late.images)
    found = mapped(ordered(rows, table, columns), task, WRITTEN_DDL).persist()
    stack.callback(found.unpersist)
    with described(rows.sparkSession, "make the images, order them and write the shards"):
        results = found.where("shard IS NOT NULL").select("shard.*").collect()
    whole = _told(origin, found, results)
    late.check(whole)
    splits, files = placed(fs, paths, results, table, write.fmt)
    _refuse_empty(splits)
    return Written(splits, files, whole, found.where(f"{SAMPLE_ID} IS NOT NULL"))


def _refuse_empty(splits: Mapping[str, SplitInfo]) -> None:
    for name, split in splits.items():
        if not any(shard.records for shard in split.shards):
            raise DataError(
                f"split {name} would be empty",
                got="images that are all broken",
                allowed="an image that can be decoded in each split",
                next_step="Look at the input; give more of it or another --split.",
            )


def _told(origin: Origin, found: DataFrame, results: Sequence[Row]) -> Origin:
    """The origin with what the writing tasks rejected among the rest."""
    rejected = sum(row["rejected"] for row in results)
    if not rejected:
        return origin
    bad = found.where("bad IS NOT NULL").selectExpr(f"{c.SOURCE} AS source", f"{c.POSITION} AS position", "bad.*")
    # WriteLate takes its shard from the task's number, and a union numbers anew. Where a lost block of `found` is made
    # again, the exchange keeps it one task a shard.
    bad = bad.repartition("source", "position")
    before = origin.quarantine
    return replace(
        origin,
        quarantined=origin.quarantined + rejected,
        quarantined_raw_bytes=origin.quarantined_raw_bytes + sum(row["rejected_bytes"] for row in results),
        quarantine=bad if before is None else before.select(*bad.columns).unionByName(bad),
    )
