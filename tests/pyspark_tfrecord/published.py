"""A small published dataset of every dtype, made without Spark."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import DatasetPaths, index_path, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import Counts, FileInfo, ShardInfo, SourceInfo, SplitInfo
from lockstep.storage.documents import sha256_hex
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from tests.builders.records import RecordWriter, encode_example

SCHEMA = Schema(
    (
        Field(name="clicks", dtype="int64", nullable=True),
        Field(name="rate", dtype="float32"),
        Field(name="exact", dtype="float64"),
        Field(name="seen", dtype="bool"),
        Field(name="page", dtype="string", nullable=True),
        Field(name="raw", dtype="bytes"),
        Field(name="words", dtype="string", shape=(None,)),
        Field(name="pixels", dtype="uint8", shape=(2, 2)),
        Field(name="label", dtype="int64", kind="label", num_classes=2),
        sample_id_field(),
    )
)
BLOCK_RECORDS = 7


def row(number: int) -> dict[str, Any]:
    """A row with nulls, empty lists, unicode and NaN-free extremes here and there."""
    return {
        "clicks": None if number % 3 == 0 else number - (1 << 62),
        "rate": number / 4,
        "exact": number / 3,
        "seen": number % 2 == 0,
        "page": None if number % 5 == 0 else f"/ä/{number}",
        "raw": bytes([number % 256, 0, 255]),
        "words": [f"w{i}" for i in range(number % 3)],
        "pixels": struct.pack("4B", *(number + i & 255 for i in range(4))),
        "label": number % 2,
        "sample_id": number - 10,
    }


def publish(root: Path | str, splits: dict[str, tuple[int, ...]]) -> dict[str, list[dict[str, Any]]]:
    """Write the dataset, `splits` giving the records of each shard; returns the rows of each split."""
    url, fs = str(root), filesystem(str(root))
    files: dict[str, FileInfo] = {}
    infos: dict[str, SplitInfo] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    number = 0
    for name, sizes in splits.items():
        shards, rows[name] = [], []
        for shard, size in enumerate(sizes):
            sink = _Sink()
            writer = RecordWriter(sink)
            made = [row(number + i) for i in range(size)]
            writer.write_many(encode_example(SCHEMA, one) for one in made)
            number += size
            rows[name] += made
            path, index = shard_path(name, shard, "tfrecord"), writer.index_bytes()
            write_file(fs, join(url, path), bytes(sink.data))
            write_file(fs, join(url, index_path(name, shard)), index)
            files[index_path(name, shard)] = FileInfo(len(index), sha256_hex(index))
            offsets = tuple(writer.block_offsets(BLOCK_RECORDS))
            shards.append(ShardInfo(path, size, writer.bytes, writer.sha256, writer.crc32c, None, offsets))
        infos[name] = SplitInfo(BLOCK_RECORDS, tuple(shards))
    manifest = DatasetManifest.build(
        format="tfrecord",
        created_by={"version": "0.1.0", "config": {}, "seed": 0},
        schema=SCHEMA.to_json(),
        splits=infos,
        files=files,
        counts=Counts(number, number, 0, {}),
        source=(SourceInfo("file:///in", 3, sha256_hex(b"abc")),),
    )
    write_file(fs, DatasetPaths(url).manifest, manifest.to_bytes())
    return rows


class _Sink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)
