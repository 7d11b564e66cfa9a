"""Rejected input, kept for whoever wants to know why: Parquet files of source, position, reason and raw bytes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from etl.spark.attempts import COPY_BYTES, partition_of_task, upload
from etl.spark.errors import in_task
from etl.spark.session import described
from etl.spark.tasks import by_partition
from etl.write.shards import RUN_AGAIN
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.errors import DataError
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.binary(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
    ]
)
RESULT_DDL = "part int, path string, rows bigint, bytes bigint, sha256 string"
_RESULT = pa.schema(
    [("part", pa.int32()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("sha256", pa.string())]
)
PART_BYTES = 128 << 20
GROUP_ROWS = 1024


def write_quarantine(
    rows: DataFrame, *, count: int, raw_bytes: int, attempts: str, source_urls: tuple[str, ...]
) -> list[tuple[str, FileInfo]]:
    """Write `rows` (source int, position, reason, raw, length, sha256); returns attempt URLs and digests in order.

    `rows` may have a `place`: where a source is a folder, the path of the file below it, told behind the source's URL.
    The number of files follows from `raw_bytes`, a row's file from a hash of its place, and rows lie in order of
    source and position: the same bytes however Spark cuts the work. No rows give one empty file.
    """
    from pyspark.sql import functions as f

    if count == 0:
        table = WriteQuarantine(attempts, source_urls, {}).write(0, iter(()))
        results = table.to_pylist()
    else:
        parts = -(-max(raw_bytes, 1) // PART_BYTES)
        if "place" not in rows.columns:
            rows = rows.withColumn("place", f.lit(None).cast("string"))
        part = f.pmod(f.xxhash64("source", "position", "place"), f.lit(parts)).cast("int")
        placed = rows.select("source", "position", "place", "reason", "raw", "length", "sha256")
        ordered = by_partition(placed, parts, part).sortWithinPartitions("source", "position", "place")
        write = WriteQuarantine(attempts, source_urls, hadoop_settings())
        with described(rows.sparkSession, "write the rejected input"):
            results = [row.asDict() for row in ordered.mapInArrow(write, RESULT_DDL).collect()]
    results.sort(key=lambda row: row["part"])
    found = sum(row["rows"] for row in results)
    if found != count:
        raise DataError(
            "the rejected records that were written are not those that were counted",
            got=f"{found} written",
            allowed=str(count),
            next_step=RUN_AGAIN,
        )
    return [(row["path"], FileInfo(row["bytes"], row["sha256"])) for row in results]


@dataclass(frozen=True)
class WriteQuarantine:
    """The function for mapInArrow: a partition's rows in order in, one row of RESULT_DDL out."""

    attempts: str
    source_urls: tuple[str, ...]
    settings: dict[str, str]

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the file of this partition, also an empty one."""
        yield self.write(partition_of_task(self.settings), batches)

    def write(self, part: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """Write the file of partition `part`; returns its row."""
        count = 0
        with tempfile.TemporaryFile(prefix="lockstep-quarantine-") as file:
            with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
                for rows in _groups(batches, self.source_urls):
                    writer.write_table(rows, row_group_size=GROUP_ROWS)
                    count += rows.num_rows
            digest, size = hashlib.sha256(), 0
            file.seek(0)
            while data := file.read(COPY_BYTES):
                digest.update(data)
                size += len(data)
            path = upload(self.attempts, f"quarantine-{part:05d}", file)
        return pa.RecordBatch.from_pylist(
            [{"part": part, "path": path, "rows": count, "bytes": size, "sha256": digest.hexdigest()}], schema=_RESULT
        )


def _groups(batches: Iterable[pa.RecordBatch], urls: tuple[str, ...]) -> Iterator[pa.Table]:
    """Rows in groups of GROUP_ROWS, whatever batches Spark hands over: the file's bytes follow from the groups."""
    held: list[dict[str, object]] = []
    for batch in batches:
        for row in batch.to_pylist():
            place = row.pop("place")
            held.append({**row, "source": urls[row["source"]] if place is None else join(urls[row["source"]], place)})
            if len(held) == GROUP_ROWS:
                yield pa.Table.from_pylist(held, schema=SCHEMA)
                held = []
    if held:
        yield pa.Table.from_pylist(held, schema=SCHEMA)
