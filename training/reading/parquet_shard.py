"""Reads one Parquet shard: a block is a row group, whose column chunks are fetched and checked by page checksums.

In an indexed file of another program a block is a number of rows, and the row groups that hold them are fetched.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from lockstep.features.examples.column_checks import check_unsigned
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.indexed_parquet import IndexedRows, group_starts, groups_of
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.parquet_footer import MAGIC, damaged_footer, read_published_footer
from lockstep.training.reading.stretches import Stretches

if TYPE_CHECKING:
    from lockstep.features.condition import Condition


def whole_block(first_record: int, block_records: int, records: int) -> tuple[int, int]:
    """First record and number of the records of the block that holds a record, in a shard of so many records."""
    first = first_record - first_record % block_records
    return first, min(block_records, records - first)


class ParquetShard:
    """Reads blocks of one shard. The footer is read once, checked against its digest, and only then parsed.

    Its row groups, their sizes and the column types are checked against manifest and schema, and that column chunks are
    within the file. Page checksums cover their content. `indexed` makes the records of another program's file; then its
    row groups may have any sizes. Of the schema only `columns` are read (None: all); offsets of bytes are those among
    `stretches`.
    """

    by_block = True
    """Whether only whole blocks can be decoded."""

    def __init__(
        self,
        fs: FileSystem,
        url: str,
        info: ShardInfo,
        block_records: int,
        schema: Schema,
        indexed: IndexedRows | None = None,
        columns: Collection[str] | None = None,
    ) -> None:
        self._fs, self._url, self._info, self._block_records, self._indexed = fs, url, info, block_records, indexed
        self._schema = schema.arrow_schema()
        self._columns = frozenset(self._schema.names if columns is None else columns)
        self._unsigned = frozenset(field.name for field in schema if field.dtype == "uint64")
        self._open_groups: frozenset[int] | None = None
        self._metadata = self._read_footer()
        self._check_footer()

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that are read."""
        return self._stretches

    @property
    def edges(self) -> tuple[int, ...]:
        """The start of each row group and the end of the last; empty if row groups are not stored in order, or are not
        the blocks.
        """
        if self._starts[:-1].tolist() != list(self._info.block_offsets):
            return ()
        edges = (*self._extents[:, 0].tolist(), *self._extents[-1:, 1].tolist())
        return edges if all(a < b for a, b in pairwise(edges)) else ()

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for some of a block: all of it."""
        return whole_block(first_record, self._block_records, self._info.records)

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte that is read of the row groups of these records' block, and the byte after their last: packed
        offsets of `stretches`. Thread-safe.
        """
        groups, _ = groups_of(self._starts, *self.records_read(first_record, count))
        extents = self._extents[groups.start : groups.stop]
        return int(extents[:, 0].min()), int(extents[:, 1].max())

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode all rows of the block of some from its bytes, which begin at packed byte `start`; checks the page
        checksums.

        Raises CorruptionError naming file, first record of the block and offset.
        """
        first, size = self.records_read(first_record, count)
        groups, skip = groups_of(self._starts, first, size)
        source = pa.PythonFile(_Fetched(data, start, self._stretches, self._info.bytes), mode="r")
        checked = {"metadata": self._metadata, "page_checksum_verification": True}
        try:
            # With pre_buffer Arrow would also read what is between two chunks, which may not have been fetched.
            with pq.ParquetFile(source, pre_buffer=False, **checked) as file:
                table = file.read_row_groups(list(groups), columns=self._names, use_threads=False)
        # Arrow reports a failed checksum or a page that cannot be decoded as any of these.
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptionError(
                "a block of rows cannot be read",
                file=self._url,
                record=first,
                offset=self._stretches.place(start),
                got=str(error).splitlines()[0],
                allowed="pages that match their checksums",
            ) from error
        if table.num_rows != self._starts[groups.stop] - self._starts[groups.start]:
            raise self._footer_error(f"{table.num_rows} rows in row groups from {groups.start} on", f"{size} rows")
        if self._indexed is not None:
            return self._indexed.batch(table.slice(skip, size), first)
        columns = map(table.column, self._names)  # for a name Arrow also reads the columns NAME.OTHER
        # A column nearly always has one chunk; combine_chunks would copy it.
        chunks = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in columns]
        return self._declared(chunks, first)

    def _declared(self, columns: list[pa.Array], first: int) -> pa.RecordBatch:
        """Columns of the file as a batch of the declared schema; `first` is the number of its first record."""
        fields = [self._schema.field(name) for name in self._names]
        found = [
            column if column.type == field.type else column.cast(field.type)
            for field, column in zip(fields, columns, strict=True)
        ]
        for field, column in zip(fields, found, strict=True):
            if field.name in self._unsigned:
                check_unsigned(field.name, column, file=self._url, record=first)
            if column.null_count and not field.nullable:
                raise self._footer_error(f"nulls in `{field.name}`, records from {first} on", "none")
        return pa.RecordBatch.from_arrays(found, schema=pa.schema(fields))

    def left_open(self, first_record: int, count: int, condition: Condition) -> bool:
        """Whether the statistics of the row groups of a block leave it open that rows meet the condition; True for a
        condition that statistics cannot decide, and for one on values that are not stored as they are declared.
        """
        if self._open_groups is None:
            self._open_groups = self._groups_left_open(condition)
        groups, _ = groups_of(self._starts, *self.records_read(first_record, count))
        return not self._open_groups.isdisjoint(groups)

    def _groups_left_open(self, condition: Condition) -> frozenset[int]:
        stored = self._metadata.schema.to_arrow_schema()
        kinds = {field.name: field.type for field in stored}
        declared = {name: self._schema.field(name).type for name in condition.columns}
        as_declared = all(name in self._names and _keeps_order(kinds[name], kind) for name, kind in declared.items())
        if not condition.statistics_decide or not as_declared:
            return frozenset(range(self._metadata.num_row_groups))
        footer = pa.BufferOutputStream()  # a file of nothing but the footer
        self._metadata.write_metadata_file(footer)
        try:
            fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(footer.getvalue()))
            found = fragment.split_by_row_group(condition.expression())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._footer_error(str(error).splitlines()[0], "readable statistics") from error
        return frozenset(group.id for one in found for group in one.row_groups)

    def _read_footer(self) -> pq.FileMetaData:
        footer = read_published_footer(self._fs, self._url, self._info)
        try:
            return pq.read_metadata(pa.BufferReader(footer))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._footer_error(str(error).splitlines()[0], "a Parquet footer") from error

    def _check_footer(self) -> None:
        metadata, rows = self._metadata, self._info.records
        wanted = [min(self._block_records, rows - first) for first in range(0, rows, self._block_records)]
        try:
            self._starts = group_starts(metadata)
            schema = metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._footer_error(str(error).splitlines()[0], "a readable schema") from error
        found = np.diff(self._starts).tolist()
        exact = found == wanted if self._indexed is None else sum(found) == rows
        if not exact or metadata.num_rows != rows:
            raise self._footer_error(f"row groups of {found[:5]}... rows", f"{len(wanted)} of {wanted[:1]}... rows")
        columns = [(field.name, _plain(field.type)) for field in schema]
        declared = [(field.name, _plain(field.type)) for field in self._schema]
        if self._indexed is None and columns != declared:
            raise self._footer_error(f"columns {columns}", f"columns {declared}")
        if self._indexed is None:
            self._names = [name for name in schema.names if name in self._columns]
        else:
            self._names = self._indexed.columns(schema.names)
        self._names = self._names or schema.names[:1]  # of a partition alone: a fetch of nothing is none
        self._locate(set(self._names) == set(schema.names))

    def _locate(self, whole: bool) -> None:
        """Find the bytes of the columns that are read in each row group; looking them up in the footer is slow."""
        paths = [self._metadata.schema.column(number).path for number in range(self._metadata.num_columns)]
        names = set(self._names)
        prefixes = [set(accumulate(path.split("."), "{}.{}".format)) for path in paths]
        read = [number for number, found in enumerate(prefixes) if not found.isdisjoint(names)]
        groups = range(self._metadata.num_row_groups)
        gap_bytes = self._fs.gap_bytes
        chunks = [self._chunks(number, read) for number in groups]
        self._stretches = Stretches.whole(self._info.bytes)
        if not whole and chunks:
            self._stretches = Stretches(np.array(chunks, np.int64).reshape(-1, 2), gap_bytes)
        # (row groups, 2) int64: first packed byte, and the packed byte after the last.
        self._extents = np.array([self._packed(group) for group in chunks], np.int64).reshape(-1, 2)
        # A small gap up to the next row group belongs to the one before it, so that both are fetched in one range.
        gaps = self._extents[1:, 0] - self._extents[:-1, 1]
        joined = np.flatnonzero((gaps > 0) & (gaps <= gap_bytes))
        self._extents[joined, 1] = self._extents[joined + 1, 0]

    def _packed(self, chunks: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """First packed byte of some column chunks, and the packed byte after their last."""
        starts = [(self._stretches.pack(start, stop), stop - start) for start, stop in chunks]
        found = [(start, start + size) for start, size in starts if start is not None]  # each is in a stretch
        return min(start for start, _ in found), max(stop for _, stop in found)

    def _chunks(self, block: int, columns: Collection[int]) -> list[tuple[int, int]]:
        """First byte of each chunk of these columns in a row group, and the byte after its last; CorruptionError if one
        is not within the file.
        """
        group = self._metadata.row_group(block)
        chunks = [group.column(number) for number in columns]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        stops = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        backwards = any(stop < start for start, stop in zip(starts, stops, strict=True))
        if min(starts) < len(MAGIC) or max(stops) > self._info.bytes or backwards:
            raise self._footer_error(f"row group {block} at bytes {min(starts)} to {max(stops)}", "bytes in the file")
        return list(zip(starts, stops, strict=True))

    def _footer_error(self, got: str, allowed: str) -> CorruptionError:
        return damaged_footer(self._url, got, allowed)


def _keeps_order(stored: pa.DataType, declared: pa.DataType) -> bool:
    return stored == declared or (pa.types.is_signed_integer(stored) and pa.types.is_int64(declared))


def _plain(kind: pa.DataType) -> pa.DataType:
    # Writers differ in element names and nullability of lists; only the type of the elements counts.
    return pa.list_(kind.value_type) if pa.types.is_list(kind) else kind


class _Fetched(io.RawIOBase):
    """A file of `size` bytes of which only `data` can be read: bytes of `stretches` from packed byte `start` on."""

    def __init__(self, data: bytes | memoryview, start: int, stretches: Stretches, size: int) -> None:
        super().__init__()
        self._data, self._start, self._stretches, self._size = pa.py_buffer(data), start, stretches, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        return self.read_buffer(size).to_pybytes()

    def read_buffer(self, size: int = -1) -> pa.Buffer:
        """Arrow calls this in place of `read`, and gets a view instead of a copy."""
        packed = None if size < 0 else self._stretches.pack(self._position, self._position + size)
        start = -1 if packed is None else packed - self._start
        if start < 0 or start + size > len(self._data):
            raise OSError(f"bytes {self._position} to {self._position + size} are outside what was fetched")
        self._position += size
        return self._data[start : start + size]
