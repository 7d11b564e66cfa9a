"""A published TFRecord dataset once more, with gzip shards."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np

from lockstep.storage.dataset.layout import DatasetPaths, shard_path
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.formats.gzip_blocks import GzipWriter
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join


def repacked(plain: object, target: object) -> DatasetManifest:
    """Write the dataset at `plain` to `target` with the same records in the same shards and blocks, packed."""
    root, out = str(plain), str(target)
    manifest, fs = load_dataset(root), filesystem(root)
    files = {path: info for path, info in manifest.files.items() if not path.startswith("_index/")}
    for path in files:
        write_file(fs, join(out, path), fs.read_bytes(join(root, path)))
    splits = {}
    for name, split in manifest.splits.items():
        shards = []
        for number, shard in enumerate(split.shards):
            sink = io.BytesIO()
            writer = GzipWriter(sink, split.block_records)
            writer.write(np.frombuffer(fs.read_bytes(join(root, shard.path)), dtype=np.uint8))
            writer.finish()
            path = shard_path(name, number, "tfrecord", "gzip")
            write_file(fs, join(out, path), sink.getvalue())
            digests = writer.sha256, writer.crc32c, None
            offsets = tuple(writer.block_offsets), tuple(writer.unpacked_offsets)
            shards.append(ShardInfo(path, writer.records, writer.bytes, *digests, *offsets))
        splits[name] = replace(split, shards=tuple(shards))
    made = DatasetManifest.build(
        format="tfrecord",
        created_by=manifest.created_by,
        schema=manifest.schema,
        splits=splits,
        files=files,
        counts=manifest.counts,
        source=manifest.source,
        leakage=manifest.leakage,
        compression="gzip",
    )
    write_file(fs, DatasetPaths(out).manifest, made.to_bytes())
    return made
