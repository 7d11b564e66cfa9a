"""Late images: they are shuffled as encoded files and become pixels in the task that writes them.

A JPEG is smaller than its pixels, so caches and shuffles hold less (docs/decisions/064-image-sources.md). The number of
shards is decided before, from the size of the pixels that each header promises. An image that turns out to be broken
only then is missing in its shard and counted as rejected, like those that were found broken before.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.columns import PACKED, PLACE
from lockstep.etl.input.lines import RAW_BYTES
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import mapped, partition_of_task, rows_too_large
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.leakage import CONTENT, checks_of
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.config import OutputConfig
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.refusal import check_bad
from lockstep.etl.write.shards import RESULT, SHARDS_STEP, ShardTable, WriteShards, check_keys, ordered, placed
from lockstep.features.encode.hashing import hash_values
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.images.decode import ImageError
from lockstep.features.images.intake import Intake
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest_entries import FileInfo, SplitInfo
from lockstep.storage.errors import DataError
from lockstep.storage.files.interface import FileSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

CHUNK_BYTES = 4 << 20
_SHARD = pa.struct([*RESULT, ("rejected", pa.int64()), ("rejected_bytes", pa.int64())])
# One table for three kinds of rows, since a task has one output: a shard, a rejected image, and the id, split and leak
# key of an image that was made. Columns of the other kinds are null.
_WRITTEN = pa.schema(
    [("shard", _SHARD), *c.REJECTED, (c.SPLIT, pa.string()), (SAMPLE_ID, pa.int64()), (c.LEAK, pa.int64())]
)


@dataclass(frozen=True)
class LateImages:
    """The field that is made late, and how: its column holds pixels, or encoded files where PACKED is true.

    `content` means that the leak key is a hash of the pixels, which are not known before.
    """

    field: Field
    intake: Intake
    content: bool

    @cached_property
    def size(self) -> int:
        """Bytes of an image's pixels."""
        return math.prod(side for side in self.field.shape if side is not None)

    def stand_in(self, count: int) -> pa.Array:
        """A column of `count` values of the pixels' length, only for sizes: their content must not be read."""
        ends = pa.py_buffer(np.arange(count + 1, dtype=np.int64) * self.size)
        nothing = pa.py_buffer(b"\0")
        content = pa.foreign_buffer(nothing.address, count * self.size, nothing)
        return pa.Array.from_buffers(pa.large_binary(), count, [None, ends, content])

    def made(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
        """The rows whose image is valid, with its pixels; and the others, as rows of lockstep.etl.columns.REJECTED."""
        values = batch.column(self.field.name).to_pylist()
        bad: list[dict[str, Any]] = []
        for at, packed in enumerate(batch.column(PACKED).to_pylist()):
            if not packed:
                continue
            try:
                values[at] = self.intake.take(values[at])
            except ImageError as error:
                bad.append(_rejected(batch, at, error.reason, values[at]))
                values[at] = None
        pixels = pa.array(values, pa.binary())
        place = batch.schema.get_field_index(self.field.name)
        batch = batch.set_column(place, self.field.name, pixels)
        if bad:
            batch = batch.filter(pixels.is_valid())
        if self.content:
            key = pa.array(hash_values(batch.column(self.field.name), 0))
            batch = batch.set_column(batch.schema.get_field_index(c.LEAK), c.LEAK, key)
        return batch, bad


def _rejected(batch: pa.RecordBatch, at: int, reason: str, data: bytes) -> dict[str, Any]:
    place = {name: batch.column(name)[at].as_py() for name in (c.SOURCE, c.POSITION, PLACE)}
    whole = {c.LENGTH: len(data), c.SHA256: hashlib.sha256(data).hexdigest()}
    return {**place, c.REASON: reason, c.RAW: data[:RAW_BYTES], **whole}


@dataclass(frozen=True, kw_only=True)
class AssignLate(Assign):
    """Assign for rows whose `late` field is not made yet: nothing is encoded. With `carry` the rows also have that
    column, PACKED and PLACE, and BYTES is null; without, the input need not have that column.
    """

    late: LateImages
    carry: bool

    @classmethod
    def of(cls, assign: Assign, late: LateImages) -> AssignLate:
        """Make this assignment carry the images."""
        same = {field.name: getattr(assign, field.name) for field in fields(Assign)}
        return cls(**same, late=late, carry=True)

    @property
    def output(self) -> pa.Schema:
        """The columns of the rows that come out."""
        more = [(self.late.field.name, pa.binary()), (PACKED, pa.bool_()), (PLACE, pa.string())]
        return pa.schema([*self._narrow.output, *(map(pa.field, *zip(*more, strict=True)) if self.carry else ())])

    def _kept(self, batch: pa.RecordBatch, ids: NDArray[np.int64], splits: pa.StringArray) -> pa.RecordBatch:
        found = self._narrow._kept(batch, ids, splits)
        sizes = pa.nulls(len(found), pa.int64()) if self.carry else self._sizes(found)
        found = found.set_column(found.schema.get_field_index(c.BYTES), c.BYTES, sizes)
        if self.carry:
            for name in (self.late.field.name, PACKED, PLACE):
                found = found.append_column(name, batch.column(name))
        return found

    def _sizes(self, rows: pa.RecordBatch) -> pa.Array:
        late = self.late
        if self.fmt == "tfrecord":
            return pa.array(self._encoder.sizes(rows.append_column(late.field.name, late.stand_in(len(rows)))))
        return pc.add(rows.column(c.BYTES), c.logical_bytes(late.field, late.stand_in(len(rows))))

    @cached_property
    def _narrow(self) -> Assign:
        fields = tuple(field for field in self.schema if field.name != self.late.field.name)
        same = (self.id_columns, self.split, self.seed, "parquet", self.sample, self.weights)
        return Assign(Schema(fields), *same, files=self.files)


@dataclass(frozen=True)
class WriteLate:
    """The function for mapInArrow: rows of AssignLate in the order of their shard in, rows of _WRITTEN out."""

    write: WriteShards
    late: LateImages

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the shard of this partition, also an empty one. Raises what WriteShards raises."""
        yield from self.rows(partition_of_task(), batches)

    def rows(self, partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of _WRITTEN for the images of `partition`, the row of its shard first."""
        split = self.write.table.locate(partition)[0]
        with tempfile.TemporaryFile(prefix="lockstep-late-") as file, pa.ipc.new_stream(file, _WRITTEN) as written:
            counts = {"rejected": 0, "rejected_bytes": 0, "keys": 0}
            row = self.write.write(partition, self._made(batches, split, written, counts)).to_pylist()[0]
            row["keys"] = counts.pop("keys")
            yield pa.RecordBatch.from_pylist([{"shard": {**row, **counts}}], schema=_WRITTEN)
            written.close()
            file.seek(0)
            yield from pa.ipc.open_stream(file)

    def _made(
        self,
        batches: Iterable[pa.RecordBatch],
        split: str,
        written: pa.ipc.RecordBatchStreamWriter,
        counts: dict[str, int],
    ) -> Iterator[pa.RecordBatch]:
        encoder = RecordEncoder(self.write.schema)
        step = max(1, CHUNK_BYTES // self.late.size)
        for whole in batches:
            # Of all rows, since those that are rejected here were counted before, too.
            counts["keys"] ^= int(np.bitwise_xor.reduce(np.asarray(whole.column(c.KEY))))
            for start in range(0, whole.num_rows, step):
                batch, bad = self.late.made(whole.slice(start, step))
                if bad:
                    written.write_batch(pa.RecordBatch.from_pylist(bad, schema=_WRITTEN))
                    counts["rejected"] += len(bad)
                    counts["rejected_bytes"] += sum(len(row[c.RAW]) for row in bad)
                if not batch.num_rows:
                    continue
                names = (c.SOURCE, c.POSITION, SAMPLE_ID, c.LEAK)
                known = {c.SPLIT: pa.repeat(split, len(batch)), **{name: batch.column(name) for name in names}}
                written.write_batch(_filled(known, len(batch)))
                yield batch if self.write.fmt == "parquet" else _encoded(batch, encoder)


def _encoded(batch: pa.RecordBatch, encoder: RecordEncoder) -> pa.RecordBatch:
    """The rows with their framed records, which are in the encoder's buffer until its next use."""
    data, offsets = encoder.encode(batch)
    if len(data) >= 1 << 31:
        raise rows_too_large(len(data), len(batch))
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    own = (c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID, c.FILE)
    kept = batch.select([name for name in own if name in batch.schema.names])
    return kept.append_column(c.RECORD, pa.Array.from_buffers(pa.binary(), len(batch), buffers))


def _filled(known: dict[str, pa.Array], count: int) -> pa.RecordBatch:
    columns = [known.get(field.name) for field in _WRITTEN]
    nulls = [
        pa.nulls(count, field.type) if column is None else column
        for field, column in zip(_WRITTEN, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(nulls, schema=_WRITTEN)


@dataclass(frozen=True)
class Written:
    """Shards and indexes; the origin with images that were rejected while writing; and `rows`, an id, split and leak
    key for each record.
    """

    splits: dict[str, SplitInfo]
    files: dict[str, FileInfo]
    origin: Origin
    rows: DataFrame


def has_late_content(split: SplitSpec, schema: Schema) -> bool:
    """Whether the leak key is a hash of the pixels, which are not known before they are made."""
    return CONTENT in checks_of(split, schema)


def write_late(
    fs: FileSystem,
    paths: DatasetPaths,
    rows: DataFrame,
    table: ShardTable,
    write: WriteShards,
    keys: Mapping[str, int],
    late: LateImages,
    config: OutputConfig,
    origin: Origin,
    stack: ExitStack,
) -> Written:
    """Make the images of `rows` (of AssignLate, with images), write them, and rename each shard and index to its place.

    The results of the tasks stay cached until `stack` ends. Raises DataError if a split has only broken images, and
    what check_keys and check_bad raise for all rejected images.
    """
    carried = [field.name for field in write.schema if field.name != SAMPLE_ID]
    columns = (c.SHARD, c.KEY, c.SOURCE, c.POSITION, SAMPLE_ID, c.LEAK, PACKED, PLACE, *carried, *write.files_column)
    task = WriteLate(write, late)
    found = mapped(ordered(rows, table, columns), task, _WRITTEN).persist()
    stack.callback(found.unpersist)
    with job_description(rows.sparkSession, SHARDS_STEP, table.total):
        results = found.where("shard IS NOT NULL").select("shard.*").collect()
    whole = _with_rejected(origin, found, results)
    assert whole.quarantine is not None and whole.read is not None
    check_keys(results, table, keys)
    urls = [source.url for source in whole.sources]
    judged = whole.read - sum(whole.dropped.values())  # of images, other files are left out by their names
    check_bad(config, whole.quarantine, urls, whole.quarantined, judged)
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


def _with_rejected(origin: Origin, found: DataFrame, results: Sequence[Row]) -> Origin:
    """The origin with the images that the writing tasks rejected."""
    rejected = sum(row["rejected"] for row in results)
    if not rejected:
        return origin
    bad = found.where(f"{c.REASON} IS NOT NULL").select(*c.REJECTED.names)
    # WriteLate takes its shard from the task's number, and a union renumbers tasks. If a lost block of `found` is
    # computed again, this exchange keeps one task a shard.
    bad = bad.repartition(c.SOURCE, c.POSITION)
    before = origin.quarantine
    return replace(
        origin,
        quarantined=origin.quarantined + rejected,
        quarantined_raw_bytes=origin.quarantined_raw_bytes + sum(row["rejected_bytes"] for row in results),
        quarantine=bad if before is None else before.select(*c.REJECTED.names).union(bad),
    )
