"""Reads parts of a shard as a reader does, without its threads."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lockstep.storage.fs import filesystem
from lockstep.training.plan.order import Run
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.reading.reader import SplitReader
from lockstep.training.reading.shards import GzipShard, TFRecordShard


def read_block(shard: GzipShard | ParquetShard, url: str, block: int, block_records: int) -> pa.RecordBatch:
    """All records of a block of the shard at `url`."""
    start, stop = shard.extent(block * block_records, 1)
    return shard.decode(filesystem(url).read_range(url, start, stop - start), start, block * block_records, 1)


def read_records(shard: TFRecordShard, url: str, first_record: int, count: int) -> pa.RecordBatch:
    """Records of one block of the shard at `url`, from `first_record` on."""
    start, stop = shard.extent(first_record, count)
    return shard.decode(filesystem(url).read_range(url, start, stop - start), start, first_record, count)


def read_all(reader: SplitReader, runs: Sequence[Run] | None = None) -> pa.RecordBatch:
    """The records of `runs`, one after another, or all records of the split."""
    runs = [reader.table.run(block) for block in range(reader.table.num_blocks)] if runs is None else runs
    return pa.concat_batches([reader.read(run) for run in runs])
