"""A small published dataset, written by storage alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.storage.dataset.layout import DatasetPaths, fitted_path, index_path, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, ShardInfo, SourceInfo, SplitInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.formats.parquet_footer import read_footer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import publish_directory, write_file
from lockstep.storage.urls import join
from tests.builders.records import RecordWriter, crc32c_hex

BLOCK_RECORDS = 8


class _Bytes:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


def make_dataset(
    root: str,
    *,
    fmt: str = "tfrecord",
    records: int = 30,
    vocabulary: bytes = b'["a","b"]',
    config: dict[str, Any] | None = None,
) -> DatasetManifest:
    """Write and publish a dataset with the splits train (two shards, 10 and the rest) and test (4 records)."""
    fs = filesystem(root)
    staging = DatasetPaths(DatasetPaths(root).staging("made"))
    files: dict[str, FileInfo] = {}
    splits = {}
    for split, sizes in (("train", (10, records - 10)), ("test", (4,))):
        shards = []
        for number, size in enumerate(sizes):
            rows = [f"{split} {number} {row} ".encode() * (row + 1) for row in range(size)]
            data, offsets, index = _tfrecord(rows) if fmt == "tfrecord" else _parquet(rows)
            path = shard_path(split, number, fmt)
            write_file(fs, join(staging.root, path), data)
            footer = sha256_hex(footer_of(data)) if fmt == "parquet" else None
            shards.append(ShardInfo(path, size, len(data), sha256_hex(data), crc32c_hex(data), footer, tuple(offsets)))
            if index is not None:
                _add(staging.root, files, index_path(split, number), index)
        splits[split] = SplitInfo(BLOCK_RECORDS, tuple(shards))
    _add(staging.root, files, fitted_path("page.json"), vocabulary)
    _add(staging.root, files, "_quarantine/part-00000.parquet", _parquet([b"bad"])[0])
    manifest = DatasetManifest.build(
        format=fmt,
        created_by={"version": "0.1.0", "config": config or {}, "seed": 1},
        schema={"fields": [{"name": "x", "dtype": "bytes"}]},
        splits=splits,
        files=files,
        counts=Counts(records + 4 + 1 + 2, records + 4, 1, {"censored": 2}),
        source=(SourceInfo("file:///in", 3, sha256_hex(b"abc")),),
        leakage={"kind": "random", "checked": ["content"], "found": {"content": 3}},
    )
    write_file(fs, staging.manifest, manifest.to_bytes())
    publish_directory(fs, staging.root, root)
    return manifest


def footer_of(data: bytes) -> bytes:
    """The footer of a Parquet file."""
    return read_footer(lambda offset, length: data[offset : offset + length], len(data), "data")


def _add(root: str, files: dict[str, FileInfo], path: str, data: bytes) -> None:
    write_file(filesystem(root), join(root, path), data)
    files[path] = FileInfo(len(data), sha256_hex(data))


def _tfrecord(rows: list[bytes]) -> tuple[bytes, list[int], bytes]:
    sink = _Bytes()
    writer = RecordWriter(sink)
    writer.write_many(rows)
    return bytes(sink.data), writer.block_offsets(BLOCK_RECORDS), writer.index_bytes()


def _parquet(rows: list[bytes]) -> tuple[bytes, list[int], None]:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": rows, "sample_id": pa.array(range(len(rows)), pa.int64())})
    pq.write_table(table, sink, row_group_size=BLOCK_RECORDS, write_page_checksum=True, compression="zstd")
    return sink.getvalue().to_pybytes(), list(range(0, len(rows), BLOCK_RECORDS)), None
