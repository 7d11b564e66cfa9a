"""What `lockstep index` prints: files, records, bytes and columns."""

from __future__ import annotations

from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.indexed import IndexedManifest
from lockstep.storage.dataset.manifest import DatasetManifest


def of_files(url: str, manifest: IndexedManifest) -> str:
    """The files of TFRecords, and a line for each column."""
    records = sum(file.records for file in manifest.files)
    size = sum(file.bytes for file in manifest.files)
    lines = [f"{url}: {len(manifest.files)} files, {records} records, {size} bytes"]
    lines += [f"  {name}: {f'list of {dtype}' if many else dtype}" for name, dtype, many in manifest.columns]
    return "\n".join([*lines, f"schema from {manifest.sampled} records; read it by spark.read.format('tfrecord')"])


def of_dataset(url: str, manifest: DatasetManifest) -> str:
    """The Parquet files that are a dataset now: a line for each split and for each field."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    size = sum(shard.bytes for shard in shards)
    lines = [f"{url}: {len(shards)} files, {manifest.counts.written} records, {size} bytes"]
    table = manifest.created_by["config"].get("table")
    if table is not None:
        lines.append(f"  {table['format']} table, version {table['version']}")
    for name, split in sorted(manifest.splits.items()):
        lines.append(f"  {name}: {split.records} records in {len(split.shards)} files, blocks of {split.block_records}")
    for field in Schema.from_json(manifest.schema):
        if field.kind != "id":
            kind = f"list of {field.dtype}" if field.is_list else field.dtype
            lines.append(f"  {field.name}: {kind}, {field.kind}")
    ids = ", ".join(manifest.indexed or ()) or "file and row: rows of a file that is renamed get other ids"
    return "\n".join([*lines, f"sample ids of {ids}"])
