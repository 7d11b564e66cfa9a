"""One TFRecord shard read by record numbers: whole blocks through the manifest, a cut block through its index lines."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.schema.schema import Schema
from lockstep.features.shards.read import check_block_bytes, check_count, strict
from lockstep.storage.dataset.manifest_shards import ShardInfo
from lockstep.storage.errors import CorruptionError
from lockstep.storage.files.interface import FileSystem

_LINES = b"0123456789 \n"


class BlockStarts:
    """Where the records of the last blocks begin that were entered in their middle, for any number of shards.

    A lane enters a cut block where its window ends and goes on there with the next one, so as many should be kept as
    there are lanes. A block's entry is 8 bytes a record. Safe for several threads.
    """

    def __init__(self, blocks: int = 8) -> None:
        self.blocks = blocks
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], npt.NDArray[np.int64]] = OrderedDict()

    def get(self, url: str, block: int) -> npt.NDArray[np.int64] | None:
        """The offsets of a block's records, (n,) int64; None where they are not kept."""
        with self._lock:
            found = self._kept.pop((url, block), None)
            if found is not None:
                self._kept[url, block] = found
            return found

    def put(self, url: str, block: int, starts: npt.NDArray[np.int64]) -> None:
        """Keep them; the block that was not asked for longest goes."""
        with self._lock:
            self._kept[url, block] = starts
            while len(self._kept) > self.blocks:
                self._kept.popitem(last=False)


class TFRecordShard:
    """Reads records of one shard. `index` is the content of its index file, already checked by digest.

    Of the index only the place of each block's first line is kept, so memory is O(blocks); the lines of a cut block
    are read again from `index_url`. With `keep_index` all of it is kept, and nothing of it is read again.
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
        *,
        starts: BlockStarts | None = None,
        keep_index: bool = False,
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
        self._starts = BlockStarts() if starts is None else starts
        self._index = index if keep_index else None

    @property
    def edges(self) -> tuple[int, ...]:
        """Where blocks begin, and where the last one ends."""
        return self._info.block_edges

    def unit(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of those that are read for some: just these."""
        return first_record, count

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of some records within one block, and the one after their last. Safe for several threads.

        Raises CorruptionError for an index, or a manifest, that does not fit.
        """
        block, skip = divmod(first_record, self._block_records)
        start, stop = self._start_of(block, skip), self._start_of(block, skip + count)
        check_block_bytes(self._url, start, stop)
        return start, stop

    def read(self, first_record: int, count: int) -> pa.RecordBatch:
        """Records first_record.. within one block, read now; raises what `extent` and `decode` raise."""
        start, stop = self.extent(first_record, count)
        return self.decode(self._fs.read_range(self._url, start, stop - start), start, first_record, count)

    def decode(self, data: bytes | memoryview, start: int, first_record: int, count: int) -> pa.RecordBatch:
        """Records first_record.. out of their bytes, which begin at byte `start`; both checksums of each are checked.

        Raises CorruptionError naming file, record and offset, DataError for records that do not fit the schema.
        """
        stop = start + len(data)
        found = self._decode(np.frombuffer(data, dtype=np.uint8), self._url, first_record, start)
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
