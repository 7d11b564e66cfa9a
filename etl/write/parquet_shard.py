"""A Parquet shard as a local file: its row groups, how it is written, and its digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from etl.spark.attempts import COPY_BYTES
from lockstep.features.schema.schema import Schema
from lockstep.storage.documents import sha256_hex
from lockstep.storage.formats.parquet_footer import read_footer


def write_parquet(file: IO[bytes], schema: Schema, batches: Iterable[pa.RecordBatch], block_records: int) -> int:
    """Write rows as row groups of `block_records`; returns how many rows."""
    arrow, records = schema.arrow_schema(), 0
    with pq.ParquetWriter(file, arrow, **parquet_options(schema)) as writer:
        for block in _blocks(batches, arrow, block_records):
            writer.write_table(block, row_group_size=block_records)
            records += block.num_rows
    return records


def parquet_options(schema: Schema) -> dict[str, Any]:
    """How Parquet is written: zstd, each page with its checksum, nothing that depends on time or place.

    Tensors are pixels or embeddings that a dictionary cannot shrink: it is left out for them.
    """
    plain = [field.name for field in schema if not field.is_tensor]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": plain or False,
        "write_page_checksum": True,
        "write_statistics": True,
        "version": "2.6",
    }


def _blocks(batches: Iterable[pa.RecordBatch], arrow: pa.Schema, block_records: int) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(pa.RecordBatch.from_arrays([batch.column(f.name).cast(f.type) for f in arrow], schema=arrow))
        rows += batch.num_rows
        if rows < block_records:
            continue
        table = pa.Table.from_batches(held, arrow)
        whole = rows // block_records * block_records
        for start in range(0, whole, block_records):
            yield table.slice(start, block_records)
        held, rows = table.slice(whole).to_batches(), rows - whole
    if rows:
        yield pa.Table.from_batches(held, arrow)


def digests_of(file: IO[bytes]) -> tuple[int, str, str, str]:
    """Length, SHA-256 and CRC-32C of a Parquet file, and the SHA-256 of its footer."""
    sha256, crc, size = hashlib.sha256(), 0, 0
    file.seek(0)
    while data := file.read(COPY_BYTES):
        sha256.update(data)
        crc, size = google_crc32c.extend(crc, data), size + len(data)
    footer = read_footer(lambda offset, length: _range(file, offset, length), size, "a new shard")
    return size, sha256.hexdigest(), f"{crc:08x}", sha256_hex(footer)


def _range(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)
