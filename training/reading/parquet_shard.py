"""Reads one Parquet shard: a block is a row group, fetched by one range read and checked by its page checksums.

In an indexed file of another program a block is a number of rows, and the row groups that hold them are fetched.
"""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.examples.column_checks import check_unsigned
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.indexed_parquet import IndexedRows, group_starts, groups_of
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.parquet_footer import MAGIC, damaged_footer, read_published_footer


def whole_block(first_record: int, block_records: int, records: int) -> tuple[int, int]:
    """First record and number of the records of the block that holds a record, in a shard of so many records."""
    first = first_record - first_record % block_records
    return first, min(block_records, records - first)


class ParquetShard:
    """Reads blocks of one shard. The footer is read once, checked against its digest, and only then parsed.

    Its row groups, their sizes and the column types are checked against manifest and schema, and that column chunks are
    within the file. Page checksums cover their content. `indexed` makes the records of another program's file; then its
    row groups may have any sizes.
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
    ) -> None:
        self._fs, self._url, self._info, self._block_records, self._indexed = fs, url, info, block_records, indexed
        self._schema = schema.arrow_schema()
        self._unsigned = frozenset(field.name for field in schema if field.dtype == "uint64")
        self._metadata = self._read_footer()
        self._check_footer()

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
        """First byte of the row groups of these records' block, and the byte after their last. Thread-safe."""
        groups, _ = groups_of(self._starts, *self.records_read(first_record, count))
        extents = self._extents[groups.start : groups.stop]
        return int(extents[:, 0].min()), int(extents[:, 1].max())

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Decode all rows of the block of some from its bytes, which begin at byte `start`; checks the page checksums.

        Raises CorruptionError naming file, first record of the block and offset.
        """
        first, size = self.records_read(first_record, count)
        groups, skip = groups_of(self._starts, first, size)
        source = pa.PythonFile(_Stretch(data, start, self._info.bytes), mode="r")
        try:
            with pq.ParquetFile(source, metadata=self._metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups(list(groups), columns=self._names, use_threads=False)
        # Arrow reports a failed checksum or a page that cannot be decoded as any of these.
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptionError(
                "a block of rows cannot be read",
                file=self._url,
                record=first,
                offset=start,
                got=str(error).splitlines()[0],
                allowed="pages that match their checksums",
            ) from error
        if table.num_rows != self._starts[groups.stop] - self._starts[groups.start]:
            raise self._footer_error(f"{table.num_rows} rows in row groups from {groups.start} on", f"{size} rows")
        if self._indexed is not None:
            return self._indexed.batch(table.slice(skip, size), first)
        # A column nearly always has one chunk; combine_chunks would copy it.
        chunks = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
        return self._declared(chunks, first)

    def _declared(self, columns: list[pa.Array], first: int) -> pa.RecordBatch:
        """Columns of the file as a batch of the declared schema; `first` is the number of its first record."""
        found = [
            column if column.type == field.type else column.cast(field.type)
            for field, column in zip(self._schema, columns, strict=True)
        ]
        for field, column in zip(self._schema, found, strict=True):
            if field.name in self._unsigned:
                check_unsigned(field.name, column, file=self._url, record=first)
            if column.null_count and not field.nullable:
                raise self._footer_error(f"nulls in `{field.name}`, records from {first} on", "none")
        return pa.RecordBatch.from_arrays(found, schema=self._schema)

    def _read_footer(self) -> pq.FileMetaData:
        footer = read_published_footer(self._fs, self._url, self._info)
        try:
            return pq.read_metadata(pa.BufferReader(footer))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._footer_error(str(error).splitlines()[0], "a Parquet footer") from error

    def _check_footer(self) -> None:
        metadata, rows = self._metadata, self._info.records
        wanted = [min(self._block_records, rows - first) for first in range(0, rows, self._block_records)]
        groups = range(metadata.num_row_groups)
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
        self._names = None if self._indexed is None else self._indexed.columns(schema.names)
        # (row groups, 2) int64: first byte, and the byte after the last; looking them up in the footer is slow.
        self._extents = np.array([self._extent(number) for number in groups], dtype=np.int64).reshape(-1, 2)

    def _extent(self, block: int) -> tuple[int, int]:
        """First byte of a row group and the byte after its last; CorruptionError if it is not within the file."""
        group = self._metadata.row_group(block)
        chunks = [group.column(number) for number in range(group.num_columns)]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        stops = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        if min(starts) < len(MAGIC) or max(stops) > self._info.bytes or max(starts) > max(stops):
            raise self._footer_error(f"row group {block} at bytes {min(starts)} to {max(stops)}", "bytes in the file")
        return min(starts), max(stops)

    def _footer_error(self, got: str, allowed: str) -> CorruptionError:
        return damaged_footer(self._url, got, allowed)


def _plain(kind: pa.DataType) -> pa.DataType:
    # Writers differ in element names and nullability of lists; only the type of the elements counts.
    return pa.list_(kind.value_type) if pa.types.is_list(kind) else kind


class _Stretch(io.RawIOBase):
    """A file of `size` bytes of which only `data`, at `offset`, can be read."""

    def __init__(self, data: bytes | memoryview, offset: int, size: int) -> None:
        super().__init__()
        self._data, self._offset, self._size, self._position = pa.py_buffer(data), offset, size, 0

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
        start = self._position - self._offset
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise OSError(f"bytes {self._position} to {self._position + size} are outside the row group")
        self._position += stop - start
        return self._data[start:stop]
