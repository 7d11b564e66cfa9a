"""The last pass, in the tasks: a partition is a shard, written under a name of its own that the driver changes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import columns as c
from etl.logs.text import flat
from etl.spark.attempts import partition_of_task, upload
from etl.spark.errors import SameIdError, in_task
from etl.write.parquet_shard import digests_of, write_parquet
from lockstep.features.sample_id import shard_of
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from lockstep.storage.formats.framed_writer import FramedWriter
from lockstep.storage.formats.gzip_blocks import GzipWriter

RUN_AGAIN = "Run the job again; if it fails again, the session changes what Spark does with rows: report its settings."
RESULT_DDL = (
    "shard int, path string, records bigint, bytes bigint, sha256 string, crc32c string, footer_sha256 string,"
    " blocks array<bigint>, unpacked array<bigint>, index_path string, index_bytes bigint, index_sha256 string"
)
RESULT = pa.schema(
    [
        ("shard", pa.int32()),
        ("path", pa.string()),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("crc32c", pa.string()),
        ("footer_sha256", pa.string()),
        ("blocks", pa.list_(pa.int64())),
        ("unpacked", pa.list_(pa.int64())),
        ("index_path", pa.string()),
        ("index_bytes", pa.int64()),
        ("index_sha256", pa.string()),
    ]
)


@dataclass(frozen=True)
class ShardTable:
    """How partitions and shards correspond: split by split; per split its name, number of shards and block size."""

    splits: tuple[tuple[str, int, int], ...]

    @property
    def total(self) -> int:
        """Shards of all splits, which is the number of partitions."""
        return sum(count for _, count, _ in self.splits)

    def locate(self, partition: int) -> tuple[str, int, int, int]:
        """(split, shard in it, shards of it, block_records) of a partition."""
        for name, count, block_records in self.splits:
            if partition < count:
                return name, partition, count, block_records
            partition -= count
        raise AssertionError(f"no shard {partition} behind {self.splits}")


@dataclass(frozen=True)
class WriteShards:
    """The function for mapInArrow: a partition's rows in order in, one row of RESULT_DDL out.

    Raises SameIdError for two rows with one sample id, naming both.
    """

    schema: Schema
    fmt: str
    table: ShardTable
    attempts: str
    source_urls: tuple[str, ...]
    settings: dict[str, str]
    compression: str | None = None

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the shard of this partition, also an empty one."""
        yield self.write(partition_of_task(self.settings), batches)

    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Write the shard of `partition`; returns its row."""
        _, shard, count, block_records = self.table.locate(partition)
        rows = self._checked(partition, shard, count, batches)
        tfrecord = self._write_tfrecord if self.compression is None else self._write_gzip
        write = tfrecord if self.fmt == "tfrecord" else self._write_parquet
        with tempfile.TemporaryFile(prefix="lockstep-shard-") as file:
            result = {"shard": partition, **write(f"{partition:05d}", file, rows, block_records)}
        return pa.RecordBatch.from_pylist([result], schema=RESULT)

    def _write_tfrecord(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        with tempfile.TemporaryFile(prefix="lockstep-index-") as index:
            writer = FramedWriter(file, index, block_records)
            for batch in rows:
                writer.write(flat(batch.column(c.RECORD))[1])
            return {
                **self._shard(name, file, writer),
                "index_path": upload(self.attempts, f"index-{name}", index),
                "index_bytes": writer.index_bytes,
                "index_sha256": writer.index_sha256,
            }

    def _shard(self, name: str, file: IO[bytes], writer: FramedWriter | GzipWriter) -> dict[str, Any]:
        return {
            "path": upload(self.attempts, f"shard-{name}", file),
            "records": writer.records,
            "bytes": writer.bytes,
            "sha256": writer.sha256,
            "crc32c": writer.crc32c,
            "blocks": writer.block_offsets,
        }

    def _write_gzip(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        writer = GzipWriter(file, block_records)
        for batch in rows:
            writer.write(flat(batch.column(c.RECORD))[1])
        writer.finish()
        return {
            **self._shard(name, file, writer),
            "unpacked": writer.unpacked_offsets,
        }

    def _write_parquet(
        self, name: str, file: IO[bytes], rows: Iterable[pa.RecordBatch], block_records: int
    ) -> dict[str, Any]:
        records = write_parquet(file, self.schema, rows, block_records)
        size, sha256, crc32c, footer_sha256 = digests_of(file)
        return {
            "path": upload(self.attempts, f"shard-{name}", file),
            "records": records,
            "bytes": size,
            "sha256": sha256,
            "crc32c": crc32c,
            "footer_sha256": footer_sha256,
            "blocks": list(range(0, records, block_records)),
        }

    def _checked(
        self, partition: int, shard: int, count: int, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        last: tuple[int, int, int] | None = None
        for batch in batches:
            if not batch.num_rows:
                continue
            keys = np.asarray(batch.column(c.KEY)).view(np.uint64) ^ np.uint64(1 << 63)
            ends = [int(keys[0]), int(keys[-1])]  # keys rise, so the ends speak for all
            inside = all(shard_of(key, count) == shard for key in ends)
            named = pc.min_max(batch.column(c.SHARD)).as_py()
            if not inside or (keys[1:] < keys[:-1]).any() or named != {"min": partition, "max": partition}:
                raise DataError(
                    f"partition {partition} is not the shard that it is written as",
                    got=f"rows of shards {named['min']} to {named['max']}, keys {ends[0]:016x} to {ends[1]:016x}",
                    allowed=f"rows of shard {partition}, {shard} of the {count} of its split, in order of their keys",
                    next_step=RUN_AGAIN,
                )
            ids = np.asarray(batch.column(SAMPLE_ID))
            first = (int(ids[0]), batch.column(c.SOURCE)[0].as_py(), batch.column(c.POSITION)[0].as_py())
            if last is not None and last[0] == first[0]:
                raise self._collision(*last, *first[1:])
            same = np.flatnonzero(ids[1:] == ids[:-1])
            if len(same):
                at = int(same[0])
                place = [(batch.column(c.SOURCE)[i].as_py(), batch.column(c.POSITION)[i].as_py()) for i in (at, at + 1)]
                raise self._collision(int(ids[at]), *place[0], *place[1])
            last = (int(ids[-1]), batch.column(c.SOURCE)[-1].as_py(), batch.column(c.POSITION)[-1].as_py())
            yield batch

    def _collision(self, sample: int, source: int, position: int, other: int, other_position: int) -> SameIdError:
        return SameIdError(
            f"two records have one sample id, {sample & (1 << 64) - 1:016x}",
            got=f"{self.source_urls[source]} at {position}, {self.source_urls[other]} at {other_position}",
            allowed="a sample id for each record of a dataset",
            next_step="Name more id columns, or take the record in twice only once.",
        )
