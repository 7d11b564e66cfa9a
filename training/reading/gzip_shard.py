"""One gzip shard read block by block: a block is unpacked whole, whatever part of it is needed."""

from __future__ import annotations

import pyarrow as pa

from lockstep.features.schema.schema import Schema
from lockstep.features.shards.read import check_block_bytes, check_count, strict
from lockstep.storage.dataset.manifest_shards import ShardInfo
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.gzip_blocks import unpack


class GzipShard:
    """Reads blocks of one shard whose manifest entry has `unpacked_offsets`. Memory: a few times a block, unpacked."""

    def __init__(self, fs: FileSystem, url: str, info: ShardInfo, block_records: int, schema: Schema) -> None:
        assert info.unpacked_offsets is not None
        self._fs, self._url, self._info, self._block_records = fs, url, info, block_records
        self._edges, self._unpacked = info.block_edges, info.unpacked_offsets
        self._decode = strict(schema)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where blocks begin in the file, and where the last one ends."""
        return self._edges

    def unit(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of those that are read for some of a block: all of it."""
        first = first_record - first_record % self._block_records
        return first, min(self._block_records, self._info.records - first)

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of the block of these records, and the one after its last. Raises CorruptionError for one that is
        too long to be one.
        """
        block = first_record // self._block_records
        start, stop = self._edges[block], self._edges[block + 1]
        check_block_bytes(self._url, start, stop)
        return start, stop

    def read_block(self, block: int) -> pa.RecordBatch:
        """All records of a block, read now; raises what `extent` and `decode_block` raise."""
        start, stop = self.extent(block * self._block_records, 1)
        return self.decode_block(self._fs.read_range(self._url, start, stop - start), start, block)

    def decode_block(self, packed: bytes | memoryview, start: int, block: int) -> pa.RecordBatch:
        """All records of a block out of its bytes, which begin at byte `start`; both checksums of each are checked.

        Raises CorruptionError naming file, record and offset (of a block in the file, of a record in what the file
        unpacks to), DataError for records that do not fit the schema.
        """
        first_record = block * self._block_records
        place, end = self._unpacked[block], self._unpacked[block + 1]
        data = unpack(packed, end - place, file=self._url, record=first_record, offset=start)
        found = self._decode(data, self._url, first_record, place)
        count = min(self._block_records, self._info.records - first_record)
        check_count(found, count, self._url, first_record, place, end, "its manifest")
        return found
