"""Reads parts of a shard as a reader does, without its threads."""

from __future__ import annotations

import pyarrow as pa

from lockstep.storage.fs import filesystem
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.reading.shards import GzipShard, TFRecordShard


def read_block(shard: GzipShard | ParquetShard, url: str, block: int, block_records: int) -> pa.RecordBatch:
    """All records of a block of the shard at `url`."""
    start, stop = shard.extent(block * block_records, 1)
    return shard.decode_block(filesystem(url).read_range(url, start, stop - start), start, block)


def read_records(shard: TFRecordShard, url: str, first_record: int, count: int) -> pa.RecordBatch:
    """Records of one block of the shard at `url`, from `first_record` on."""
    start, stop = shard.extent(first_record, count)
    return shard.decode(filesystem(url).read_range(url, start, stop - start), start, first_record, count)
