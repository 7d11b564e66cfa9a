"""One TFRecord shard read by record numbers: whole blocks through the manifest, a cut block through its index lines."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from features.read_ranges import check_block_bytes, check_count, strict
from features.schema import Schema
from storage.errors import CorruptionError
from storage.fs import FileSystem
from storage.manifest import ShardInfo

# A lane enters a cut block where its window ends and goes on there with the next one: a few remembered blocks a shard
# spare the second look. A block's entry is 8 bytes a record.
_REMEMBERED_BLOCKS = 8


class TFRecordShard:
    """Reads records of one shard. `index` is the content of its index file, already checked by digest.

    Of the index only the place of each block's first line is kept, so memory is O(blocks); the lines of a cut block
    are read again from `index_url`.
    """

    def __init__(
        self,
        fs: FileSystem,
        url: str,
        info: ShardInfo,
        block_records: int,
        schema: Schema,
        index_url: str,
        index: bytes,
    ) -> None:
        self._fs, self._url, self._info, self._decode = fs, url, info, strict(schema)
        self._block_records, self._index_url = block_records, index_url
        line_ends = np.flatnonzero(np.frombuffer(index, dtype=np.uint8) == ord("\n")) + 1
        if len(line_ends) != info.records or (len(index) and line_ends[-1] != len(index)):
            raise CorruptionError(
                "an index has not one line a record",
                file=index_url,
                got=f"{len(line_ends)} lines",
                allowed=f"{info.records} records",
            )
        line_starts = np.concatenate([[0], line_ends]).astype(np.int64)
        # (blocks + 1,) int64: bytes of the index file; block b's lines are first_line[b] to first_line[b + 1].
        self._first_line = np.append(line_starts[:-1][::block_records], line_starts[-1])
        self._starts: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    def read(self, first_record: int, count: int) -> pa.RecordBatch:
        """Records first_record.. within one block, both checksums of each checked.

        Raises CorruptionError naming file, record and offset, DataError for records that do not fit the schema.
        """
        block, skip = divmod(first_record, self._block_records)
        start, stop = self._start_of(block, skip), self._start_of(block, skip + count)
        check_block_bytes(self._url, start, stop)
        data = self._fs.read_range(self._url, start, stop - start)
        found = self._decode(data, self._url, first_record, start)
        check_count(found, count, self._url, first_record, start, stop, "its index")
        return found

    def _start_of(self, block: int, skip: int) -> int:
        """Byte offset of the record `skip` records into a block; that of the next block for the block's size."""
        offsets = self._info.block_offsets
        size = min(self._block_records, self._info.records - block * self._block_records)
        if skip == 0:
            return offsets[block]
        if skip == size:
            return offsets[block + 1] if block + 1 < len(offsets) else self._info.bytes
        starts = self._starts.pop(block, None)
        if starts is None:
            starts = self._block_starts(block, size)
            while len(self._starts) >= _REMEMBERED_BLOCKS:
                self._starts.popitem(last=False)
        self._starts[block] = starts
        return int(starts[skip])

    def _block_starts(self, block: int, size: int) -> npt.NDArray[np.int64]:
        begin, end = int(self._first_line[block]), int(self._first_line[block + 1])
        lines = self._fs.read_range(self._index_url, begin, end - begin).split()
        if len(lines) == 2 * size and all(map(bytes.isdigit, lines)):
            starts, sizes = np.array(lines, dtype=np.int64).reshape(size, 2).T  # (size, 2) -> two (size,)
            ends = np.append(starts[1:], self._start_of(block, size))
            if starts[0] == self._info.block_offsets[block] and bool((ends == starts + sizes).all()):
                return starts.copy()
        raise CorruptionError(
            "index lines do not fit the block that they describe",
            file=self._index_url,
            record=block * self._block_records,
            offset=begin,
            got=repr(b" ".join(lines[:2])),
            allowed=f"{size} records end to end from offset {self._info.block_offsets[block]}",
        )
