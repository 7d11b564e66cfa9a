"""Opens the shards of a split with the reader of their format, after checking that they are the published ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.schema.schema import Schema
from lockstep.features.shards.indexed_parquet import IndexedRows
from lockstep.features.shards.read import check_block_bytes, check_count, strict
from lockstep.storage.dataset.layout import index_path
from lockstep.storage.dataset.manifest import DatasetManifest, read_checked
from lockstep.storage.dataset.manifest_entries import ShardInfo, SplitInfo
from lockstep.storage.errors import CorruptionError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.formats.gzip_blocks import unpack
from lockstep.storage.urls import join
from lockstep.training.reading.parquet_shard import ParquetShard, whole_block
from lockstep.training.reading.stretches import Stretches

if TYPE_CHECKING:
    from lockstep.features.condition import Condition

_LINES = b"0123456789 \n"
KEPT_INDEX_BYTES = 32 << 20  # 20 bytes a record: up to 1.6 million records no index is read twice


class BlockStarts:
    """The offsets of the records in the blocks that were last entered in their middle, for any number of shards.

    A window of a lane may end within a block, and the lane's next window continues there: keep at least as many blocks
    as there are lanes. A block takes 8 bytes a record. Thread-safe.
    """

    def __init__(self, blocks: int = 8) -> None:
        self.blocks = blocks
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], npt.NDArray[np.int64]] = OrderedDict()

    def get(self, url: str, block: int) -> npt.NDArray[np.int64] | None:
        """The offsets of a block's records, (n,) int64; None if they are not kept."""
        with self._lock:
            found = self._kept.pop((url, block), None)
            if found is not None:
                self._kept[url, block] = found
            return found

    def put(self, url: str, block: int, starts: npt.NDArray[np.int64]) -> None:
        """Keep the `starts` of a block, and drop those of the least recently used block."""
        with self._lock:
            self._kept[url, block] = starts
            while len(self._kept) > self.blocks:
                self._kept.popitem(last=False)


class TFRecordShard:
    """Reads records of one shard. `index` is the content of its index file, already checked against its digest.

    Only the offset of each block's first line in the index is kept, so memory is O(blocks); the lines of a block that
    is entered in its middle are read again from `index_url`. `keep_index` keeps the whole index, and reads nothing
    again.
    """

    by_block = False
    """Whether only whole blocks can be decoded."""

    def __init__(
        self,
        fs: FileSystem,
        url: str,
        info: ShardInfo,
        block_records: int,
        schema: Schema,
        index_url: str,
        index: bytes,
        *,
        starts: BlockStarts | None = None,
        keep_index: bool = False,
    ) -> None:
        self._fs, self._url, self._info, self._decode = fs, url, info, strict(schema)
        self._block_records, self._index_url = block_records, index_url
        line_ends = np.flatnonzero(np.frombuffer(index, dtype=np.uint8) == ord("\n")) + 1
        if len(line_ends) != info.records or (len(index) and line_ends[-1] != len(index)):
            raise CorruptionError(
                "an index does not have one line a record",
                file=index_url,
                got=f"{len(line_ends)} lines",
                allowed=f"{info.records} records",
            )
        line_starts = np.concatenate([[0], line_ends]).astype(np.int64)
        # (blocks + 1,) int64: bytes of the index file; block b's lines are first_line[b] to first_line[b + 1].
        self._first_line = np.append(line_starts[:-1][::block_records], line_starts[-1])
        self._starts = BlockStarts() if starts is None else starts
        self._index = index if keep_index else None

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that are read: all."""
        return Stretches.whole(self._info.bytes)

    @property
    def edges(self) -> tuple[int, ...]:
        """The start of each block and the end of the last."""
        return self._info.block_edges

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for some: only these."""
        return first_record, count

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of some records within one block, and the byte after their last. Thread-safe.

        Raises CorruptionError for an index, or a manifest, that does not fit.
        """
        block, skip = divmod(first_record, self._block_records)
        start, stop = self._start_of(block, skip), self._start_of(block, skip + count)
        check_block_bytes(self._url, start, stop)
        return start, stop

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode records from their bytes, which begin at byte `start`; checks both checksums of each.

        Raises CorruptionError naming file, record and offset, DataError for records that do not fit the schema.
        """
        stop = start + len(data)
        found = self._decode(np.frombuffer(data, dtype=np.uint8), self._url, first_record, start)
        check_count(found, count, self._url, first_record, start, stop, "its index")
        return found

    def _start_of(self, block: int, skip: int) -> int:
        """Byte offset of record `skip` of a block; for the block's size, that of the next block."""
        offsets = self._info.block_offsets
        size = min(self._block_records, self._info.records - block * self._block_records)
        if skip == 0:
            return offsets[block]
        if skip == size:
            return offsets[block + 1] if block + 1 < len(offsets) else self._info.bytes
        starts = self._starts.get(self._url, block)
        if starts is None:
            starts = self._block_starts(block, size)
            self._starts.put(self._url, block, starts)
        return int(starts[skip])

    def _block_starts(self, block: int, size: int) -> npt.NDArray[np.int64]:
        begin, end = int(self._first_line[block]), int(self._first_line[block + 1])
        whole = self._index
        text = self._fs.read_range(self._index_url, begin, end - begin) if whole is None else whole[begin:end]
        readable = not text.translate(None, _LINES)
        numbers = np.fromstring(text if readable else b"", dtype=np.int64, sep=" ")
        if len(numbers) == 2 * size:
            starts, sizes = numbers.reshape(size, 2).T  # (size, 2) -> two (size,)
            ends = np.append(starts[1:], self._start_of(block, size))
            if starts[0] == self._info.block_offsets[block] and bool((ends == starts + sizes).all()):
                return starts.copy()
        raise CorruptionError(
            "index lines do not fit the block that they describe",
            file=self._index_url,
            record=block * self._block_records,
            offset=begin,
            got=repr(text[:40]),
            allowed=f"{size} records end to end from offset {self._info.block_offsets[block]}",
        )


class GzipShard:
    """Reads blocks of one gzip shard, whose manifest entry has `unpacked_offsets`. Memory: a few unpacked blocks."""

    by_block = True
    """Whether only whole blocks can be decoded."""

    def __init__(self, url: str, info: ShardInfo, block_records: int, schema: Schema) -> None:
        assert info.unpacked_offsets is not None
        self._url, self._info, self._block_records = url, info, block_records
        self._edges, self._unpacked = info.block_edges, info.unpacked_offsets
        self._decode = strict(schema)

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that are read: all."""
        return Stretches.whole(self._info.bytes)

    @property
    def edges(self) -> tuple[int, ...]:
        """The start of each block in the file, and the end of the last."""
        return self._edges

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for some of a block: all of it."""
        return whole_block(first_record, self._block_records, self._info.records)

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of the block of these records, and the byte after its last. Raises CorruptionError for a block
        that is too long.
        """
        block = first_record // self._block_records
        start, stop = self._edges[block], self._edges[block + 1]
        check_block_bytes(self._url, start, stop)
        return start, stop

    def decode(self, packed: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode all records of the block of some from its bytes, which begin at byte `start`; checks both checksums of
        each.

        Raises CorruptionError naming file, record and offset (of a block in the file, of a record in the unpacked
        bytes), DataError for records that do not fit the schema.
        """
        first_record, count = self.records_read(first_record, count)
        block = first_record // self._block_records
        begin, end = self._unpacked[block], self._unpacked[block + 1]
        data = unpack(packed, end - begin, file=self._url, record=first_record, offset=start)
        found = self._decode(data, self._url, first_record, begin)
        check_count(found, count, self._url, first_record, begin, end, "its manifest")
        return found


class DefaultedShard:
    """Reads a shard without some fields of `schema`, whose records have the defaults of these fields; a block is read
    whole, whatever the format.
    """

    by_block = True
    """Whether only whole blocks can be decoded."""

    def __init__(
        self,
        shard: TFRecordShard | GzipShard | ParquetShard,
        records: int,
        block_records: int,
        schema: Schema,
        lacks: Collection[str],
    ) -> None:
        """`lacks`: the fields of `schema` that the shard does not have."""
        self._shard, self._records, self._block_records, self._schema = shard, records, block_records, schema
        self._lacks = lacks

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that are read."""
        return self._shard.stretches

    @property
    def edges(self) -> tuple[int, ...]:
        """The start of each block and the end of the last; empty if blocks are not stored in order."""
        return self._shard.edges

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for some of a block: all of it."""
        return whole_block(first_record, self._block_records, self._records)

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of the block of these records, and the byte after its last. Thread-safe."""
        return self._shard.extent(*self.records_read(first_record, count))

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode the records of a block, with the defaults. Raises what the shard's format raises."""
        rows = self._shard.decode(data, start, *self.records_read(first_record, count))
        there = frozenset(rows.schema.names)
        fields = [field for field in self._schema if field.name in there or field.name in self._lacks]
        columns = [
            rows.column(field.name)
            if field.name in there
            else pa.repeat(pa.scalar(field.default, field.arrow_type), len(rows))
            for field in fields
        ]
        declared = self._schema.arrow_schema()
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([declared.field(field.name) for field in fields]))


StoredShard = TFRecordShard | GzipShard | ParquetShard | DefaultedShard


class SelectedShard:
    """Reads the records of a shard that meet a condition; a block is read whole, whatever the format.

    `kept` are how many records of each of its blocks meet it. Records of a block count from its first on, without gaps.
    """

    by_block = True
    """Whether only whole blocks can be decoded."""

    def __init__(
        self,
        shard: StoredShard,
        url: str,
        records: int,
        block_records: int,
        condition: Condition,
        kept: tuple[int, ...],
    ) -> None:
        self._shard, self._url, self._records, self._block_records = shard, url, records, block_records
        self._condition, self._kept = condition, kept

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that are read."""
        return self._shard.stretches

    @property
    def edges(self) -> tuple[int, ...]:
        """The start of each block and the end of the last; empty if blocks are not stored in order."""
        return self._shard.edges

    @property
    def pass_bytes(self) -> int:
        """The bytes of the blocks that have a record which meets the condition."""
        firsts = [block * self._block_records for block, kept in enumerate(self._kept) if kept]
        extents = [self.extent(first, 1) for first in firsts]
        return sum(stop - start for start, stop in extents)

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for some of a block: all of it."""
        return whole_block(first_record, self._block_records, self._records)

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of the block of these records, and the byte after its last. Thread-safe."""
        return self._shard.extent(*self.records_read(first_record, count))

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode the records of a block that meet the condition. Raises what the shard's format raises, and
        CorruptionError if they are not as many as were counted.
        """
        first, size = self.records_read(first_record, count)
        rows = self._condition.kept(self._shard.decode(data, start, first, size))
        wanted = self._kept[first // self._block_records]
        if len(rows) != wanted:
            raise CorruptionError(
                "a block has another number of records that meet --where",
                file=self._url,
                record=first,
                got=f"{len(rows)}",
                allowed=f"{wanted}, as when the run began",
            )
        return rows


Shard = StoredShard | SelectedShard


def pass_bytes(shard: Shard) -> int:
    """The bytes that one pass over the records of a shard fetches."""
    return shard.pass_bytes if isinstance(shard, SelectedShard) else shard.stretches.bytes


class ShardOpener:
    """Opens shards for one reader: TFRecord shards share `starts`, and keep at most KEPT_INDEX_BYTES of indexes.

    Datasets may lack fields of `schema` that state a default. Of Parquet shards only `columns` are read (None: all),
    and those of a condition.
    """

    def __init__(self, schema: Schema, columns: Collection[str] | None = None) -> None:
        self._schema, self._columns = schema, columns
        self._last: tuple[DatasetManifest | None, Schema] = None, schema
        self._index_bytes = 0
        self._parsed: Condition | None = None
        self._numbered: SplitInfo | None = None
        self._first_blocks: list[int] = []
        self._lock = threading.Lock()
        self.starts = BlockStarts()

    def open_all(self, fs: FileSystem, dataset_url: str, manifest: DatasetManifest, split: str) -> list[Shard]:
        """All shards of a split, several at once where each costs round trips to a server. Raises what `open` raises
        of the first shard that cannot be opened.
        """
        opened = partial(self.open, fs, dataset_url, manifest, split)
        numbers = range(len(manifest.splits[split].shards))
        if len(numbers) == 1 or isinstance(fs, LocalFileSystem):
            return [opened(number) for number in numbers]
        with ThreadPoolExecutor(fs.calls_at_once, thread_name_prefix="shard-open") as pool:
            return list(pool.map(opened, numbers))

    def open(self, fs: FileSystem, dataset_url: str, manifest: DatasetManifest, split: str, number: int) -> Shard:
        """Open a shard of a split, of which only selected records are read if the manifest says so.

        Raises CorruptionError if it is missing or has another length, or if its footer or index does not match the
        manifest.
        """
        info = manifest.splits[split]
        shard, block_records = info.shards[number], info.block_records
        url = join(dataset_url, shard.path)
        _check_length(fs, url, shard)
        stored = self._stored(fs, url, dataset_url, manifest, split, number)
        if info.where is None or info.kept is None:
            return stored
        with self._lock:
            kept = info.kept[slice(*self._blocks(info)[number : number + 2])]
            condition = self._condition(info.where)
        return SelectedShard(stored, url, shard.records, block_records, condition, kept)

    def _blocks(self, info: SplitInfo) -> list[int]:
        """The number of each shard's first block in the split, and the number of all blocks."""
        if self._numbered is not info:
            blocks = [-(-shard.records // info.block_records) for shard in info.shards]
            self._numbered, self._first_blocks = info, list(accumulate(blocks, initial=0))
        return self._first_blocks

    def _condition(self, where: str) -> Condition:
        from lockstep.features.condition import Condition  # its parser is loaded only for those who need it

        if self._parsed is None or self._parsed.text != where:
            self._parsed = Condition.parse(where, self._schema)
        return self._parsed

    def _stored_schema(self, manifest: DatasetManifest) -> Schema:
        """The schema of a dataset, which is that of this reader unless it lacks fields with a default."""
        known, schema = self._last
        if known is not manifest:
            there = Schema.from_json(manifest.schema)
            schema = there if self._schema.added_to(there) else self._schema
            self._last = manifest, schema
        return schema

    def _stored(
        self, fs: FileSystem, url: str, dataset_url: str, manifest: DatasetManifest, split: str, number: int
    ) -> StoredShard:
        info, schema = manifest.splits[split], self._stored_schema(manifest)
        shard, block_records = info.shards[number], info.block_records
        stored: TFRecordShard | GzipShard | ParquetShard
        if manifest.format == "parquet":
            columns = self._columns
            if columns is not None and info.where is not None:
                columns = {*columns, *self._condition(info.where).columns}
            rows = IndexedRows.of(dataset_url, manifest, shard, schema, columns)
            stored = ParquetShard(fs, url, shard, block_records, schema, rows, columns)
        elif manifest.compression is not None:
            stored = GzipShard(url, shard, block_records, schema)
        else:
            path = index_path(split, number)
            index = read_checked(fs, dataset_url, path, manifest.files[path])
            with self._lock:
                self._index_bytes += len(index)
                keep_index = self._index_bytes <= KEPT_INDEX_BYTES
            own = (fs, url, shard, block_records, schema, join(dataset_url, path), index)
            stored = TFRecordShard(*own, starts=self.starts, keep_index=keep_index)
        if schema is self._schema:
            return stored
        lacks = frozenset(field.name for field in self._schema.added_to(schema) or ())
        return DefaultedShard(stored, shard.records, block_records, self._schema, lacks)


def _check_length(fs: FileSystem, url: str, info: ShardInfo) -> None:
    try:
        size = fs.stat(url).size_bytes
    except NotFoundError:
        raise CorruptionError("a shard is missing", file=url, got="nothing", allowed=f"{info.bytes} bytes") from None
    if size != info.bytes:
        raise CorruptionError(
            "a shard has another length than its manifest says",
            file=url,
            offset=min(size, info.bytes),
            got=f"{size} bytes",
            allowed=f"{info.bytes} bytes",
        )
