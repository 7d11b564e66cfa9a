"""The plan of each shard of images in plain archives, from names and headers alone, on the driver.

Ids, splits and order follow from a file's name, sizes from those of the pixels that it becomes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl import columns as c
from etl.images.config import MAX_CLASSES, ImagesConfig
from etl.images.image_rows import BAD, DROPPED, ID_COLUMNS, OUTPUT
from etl.images.pieces import ImagePlan
from etl.images.planned_task import PlannedShard
from etl.images.source import LENGTH, OFFSET
from etl.split.assign import Assign
from etl.write.late import AssignLate, LateImages
from etl.write.place import plan_shards
from etl.write.shards import ShardTable
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema

# Each task may have to read all of the archives, where its files lie all over them.
MAX_READS = 4
FREE_READ_BYTES = 8 << 30
MAX_HELD_BYTES = 256 << 20  # the encoded files of a shard, which its task holds at once
MAX_OPENED = 10_000  # archives times tasks that open them
_SIGN = np.uint64(1 << 63)
_LOW = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)

QUARANTINE = pa.schema(
    [
        ("source", pa.int32()),
        ("position", pa.int64()),
        ("place", pa.string()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("length", pa.int64()),
        ("sha256", pa.string()),
    ]
)


class NotPlannable(Exception):
    """This input, or this output, is for the general way."""


@dataclass(frozen=True)
class Known:
    """What is known before an image is looked at: `files` that should be images, rows of etl.images.source.FILES, and
    what is rejected (rows of the quarantine) or dropped already.
    """

    files: pa.Table
    bad: list[dict[str, Any]]
    dropped: Mapping[str, int]

    @property
    def read(self) -> int:
        """Records in all."""
        return len(self.files) + len(self.bad) + sum(self.dropped.values())

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels in order."""
        return tuple(sorted(self.files.column("class").unique().to_pylist()))


def known_of(plan: ImagePlan, early: list[dict[str, Any]]) -> Known:
    """Without what turned out to be rejected `early`."""
    assert plan.files is not None
    files = plan.files.files
    if early:
        out = _numbers(np.array([row["source"] for row in early]), np.array([row["position"] for row in early]))
        every = _numbers(np.asarray(files.column(c.SOURCE)), np.asarray(files.column(c.POSITION)))
        files = files.filter(pa.array(~np.isin(every, out)))
    other = pa.Table.from_batches(plan.files.other, OUTPUT)
    named = other.rename_columns([{c.SOURCE: "source", c.POSITION: "position"}.get(n, n) for n in other.column_names])
    bad = named.filter(pc.equal(named.column("kind"), BAD)).select(QUARANTINE.names).to_pylist()
    reasons = other.filter(pc.equal(other.column("kind"), DROPPED)).column("reason").to_pylist()
    return Known(files, [*bad, *early], Counter(reasons))


def _numbers(sources: NDArray[np.integer], positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """One number for each place in the archives: none of them is 2^48 bytes long."""
    return (sources.astype(np.int64) << 48) | positions.astype(np.int64)


def refuse(config: ImagesConfig, known: Known) -> None:
    """Raise NotPlannable for what ends in an error, which the general way tells, or is written in another way."""
    names = known.files.column("name")
    if not 2 <= len(known.classes) <= (config.num_classes or MAX_CLASSES):
        raise NotPlannable(f"{len(known.classes)} classes")
    if pc.count_distinct(names).as_py() < len(names):
        raise NotPlannable("a name comes twice")
    if config.split_spec.given and known.files.column(c.SPLIT).null_count:
        raise NotPlannable("images without a split")
    refuse_bad(config, known.read, len(known.bad))


def refuse_bad(config: ImagesConfig, read: int, bad: int) -> None:
    """Raise NotPlannable for more than --max-bad allows."""
    if bad and Fraction(bad, read) > config.max_bad_share:
        raise NotPlannable(f"{bad} of {read} are bad")


@dataclass(frozen=True)
class ShardPlans:
    """The shards of what is `known`; asking for them raises NotPlannable."""

    config: ImagesConfig
    plan: ImagePlan
    known: Known
    schema: Schema

    @cached_property
    def late(self) -> LateImages:
        """How images are made."""
        return LateImages(self.schema["image"], self.config.intake, content=True)

    @cached_property
    def _rows(self) -> pa.Table:
        """Rows of etl.write.late.AssignLate without images, with the columns of FILES that say where these lie."""
        config, files = self.config, self.known.files
        whole = Assign(self.schema, ID_COLUMNS, config.split_spec, config.seed, config.fmt)
        assign = replace(AssignLate.of(whole, self.late), carry=False)
        names = pa.array(self.known.classes, pa.string())
        batches = []
        for batch in filter(len, files.to_batches()):
            zeros = pa.repeat(pa.scalar(0, pa.int64()), len(batch))
            more = {
                "number": zeros,
                c.OCCURRENCE: zeros,
                c.LEAK: pa.nulls(len(batch), pa.int64()),
                "label": pc.index_in(batch.column("class"), names).cast(pa.int64()),
            }
            found = assign.rows(_with(batch, more))
            for name in (OFFSET, LENGTH):
                found = found.append_column(name, batch.column(name))
            batches.append(found)
        rows = pa.Table.from_batches(batches).combine_chunks()
        if pc.count_distinct(rows.column(SAMPLE_ID)).as_py() < len(rows):
            raise NotPlannable("two names have one id")
        return rows

    @cached_property
    def table(self) -> ShardTable:
        """The shards of each split, and of how many records their blocks are."""
        config, split, rows = self.config, self.config.split_spec, self._rows
        found = rows.group_by(c.SPLIT).aggregate([(c.BYTES, "count"), (c.BYTES, "sum")])
        found = found.select([c.SPLIT, f"{c.BYTES}_count", f"{c.BYTES}_sum"])
        sizes = {name: (count, size) for name, count, size in sorted(zip(*found.to_pydict().values(), strict=True))}
        if set(split.names) - set(sizes):
            raise NotPlannable("an empty split")
        table = plan_shards(sizes, config.shard_bytes, config.row_group_bytes, alike=split.kind == "kfold")
        archives = sum(source.size_bytes for source in self.plan.sources)
        read = archives * table.total
        if read > max(MAX_READS * archives, FREE_READ_BYTES) or len(self.plan.sources) * table.total > MAX_OPENED:
            raise NotPlannable(f"{table.total} shards out of {archives} bytes")
        if pc.sum(rows.column(LENGTH)).as_py() > len(rows) * self.late.size:
            raise NotPlannable("files that are longer than their pixels")
        return table

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """The records of each class in each split, with those that turn out broken."""
        found: dict[str, dict[str, int]] = {}
        for row in self._rows.group_by([c.SPLIT, "label"]).aggregate([("label", "count")]).to_pylist():
            found.setdefault(row[c.SPLIT], {})[str(row["label"])] = row["label_count"]
        return {name: dict(sorted(found[name].items())) for name in sorted(found)}

    def shards(self) -> list[PlannedShard]:
        """What the task of each shard has to do."""
        rows, table = self._rows, self.table
        keys, shards = np.asarray(rows.column(c.KEY)), np.zeros(len(rows), dtype=np.int64)
        base = 0
        for name, count, _ in table.splits:
            here = np.asarray(pc.equal(rows.column(c.SPLIT), name))
            shards[here] = base + shards_of(keys[here].view(np.uint64) ^ _SIGN, count).astype(np.int64)
            base += count
        order = np.lexsort((np.asarray(rows.column(SAMPLE_ID)), keys, shards))
        borders = np.searchsorted(shards[order], np.arange(table.total + 1))
        carried = [name for name in rows.column_names if name not in (c.SPLIT, c.DROPPED, c.LEAK, c.BYTES)]
        plans = []
        for shard, (first, last) in enumerate(itertools.pairwise(borders.tolist())):
            mine = rows.select(carried).take(pa.array(order[first:last]))
            if (pc.sum(mine.column(LENGTH)).as_py() or 0) > MAX_HELD_BYTES:
                raise NotPlannable(f"a shard of more than {MAX_HELD_BYTES} bytes of files")
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, mine.schema) as stream:
                stream.write_table(mine)
            plans.append(PlannedShard(shard, sink.getvalue().to_pybytes()))
        return plans


def _with(batch: pa.RecordBatch, more: Mapping[str, pa.Array]) -> pa.RecordBatch:
    for name, column in more.items():
        batch = batch.append_column(name, column)
    return batch


def shards_of(keys: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """floor(key * count / 2^64) of each key, `count` below 2^31."""
    number = np.uint64(count)
    return ((keys >> _HALF) * number + ((keys & _LOW) * number >> _HALF)) >> _HALF
