"""One gzip shard read block by block: a block is unpacked whole, whatever part of it is needed."""

from __future__ import annotations

import pyarrow as pa

from features.read_ranges import check_block_bytes, check_count, strict
from features.schema import Schema
from storage.fs import FileSystem
from storage.gzip_blocks import unpack
from storage.manifest import ShardInfo


class GzipShard:
    """Reads blocks of one shard whose manifest entry has `unpacked_offsets`. Memory: a few times a block, unpacked."""

    def __init__(self, fs: FileSystem, url: str, info: ShardInfo, block_records: int, schema: Schema) -> None:
        assert info.unpacked_offsets is not None
        self._fs, self._url, self._info, self._block_records = fs, url, info, block_records
        self._edges, self._unpacked = info.block_edges, info.unpacked_offsets
        self._decode = strict(schema)

    def read_block(self, block: int) -> pa.RecordBatch:
        """All records of a block, both checksums of each checked.

        Raises CorruptionError naming file, record and offset (of a block in the file, of a record in what the file
        unpacks to), DataError for records that do not fit the schema.
        """
        first_record = block * self._block_records
        start, stop = self._edges[block], self._edges[block + 1]
        check_block_bytes(self._url, start, stop)
        packed = self._fs.read_range(self._url, start, stop - start)
        place, end = self._unpacked[block], self._unpacked[block + 1]
        data = unpack(packed, end - place, file=self._url, record=first_record, offset=start)
        found = self._decode(data, self._url, first_record, place)
        count = min(self._block_records, self._info.records - first_record)
        check_count(found, count, self._url, first_record, place, end, "its manifest")
        return found
