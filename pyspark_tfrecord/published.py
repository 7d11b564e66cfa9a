"""Reading a published dataset: schema and partitions come from its manifest, so planning opens no shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from lockstep.features.schema.schema import Schema
from lockstep.features.shards.ranges import ShardRange, cut
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from pyspark_tfrecord.options import ReadOptions

SPLIT_COLUMN = "split"  # what Spark makes of the directories split=NAME of a Parquet dataset
MAX_PARTITIONS = 20_000  # what a driver can plan and Spark's page can show; larger datasets get larger partitions


@dataclass
class PublishedPartition(InputPartition):
    """What one task reads: a range of a shard and the split that it belongs to."""

    part: ShardRange
    split: str


class Published:
    """The dataset at options.path."""

    def __init__(self, options: ReadOptions, manifest: DatasetManifest) -> None:
        self.options = options
        self.schema = Schema.from_json(manifest.schema)
        self.splits = _splits(options, manifest)
        if manifest.format != "tfrecord":
            raise ConfigError(
                f"{options.path} is a dataset of {manifest.format} shards",
                got=manifest.format,
                allowed="a dataset of TFRecord shards, or TFRecord files without a manifest",
                next_step=f'Read it by spark.read.{manifest.format}("{options.path}").',
            )
        if options.split is None and SPLIT_COLUMN in {field.name for field in self.schema}:
            raise ConfigError(
                f"{options.path} has its own column `{SPLIT_COLUMN}`, the name of the column that says the split",
                got="no option `split`",
                allowed=", ".join(manifest.splits),
                next_step='Name one split: .option("split", NAME).',
            )
        self._cuts = {name: manifest.splits[name] for name in self.splits}

    def arrow_schema(self) -> pa.Schema:
        """The columns that can be read: the dataset's, and `split` unless one split is named."""
        found = self.schema.arrow_schema()
        return found if self.options.split is not None else found.append(pa.field(SPLIT_COLUMN, pa.string(), False))

    def partitions(self) -> list[InputPartition]:
        """One for each range of about `partition_bytes`, split by split in order; one a shard for verify=full."""
        total = sum(shard.unpacked_bytes for info in self._cuts.values() for shard in info.shards)
        size = None if self.options.verify == "full" else max(self.options.partition_bytes, total // MAX_PARTITIONS)
        found: list[InputPartition] = []
        for name, info in self._cuts.items():
            for shard in info.shards:
                parts = cut(join(self.options.path, shard.path), shard, info.block_records, size)
                found += [PublishedPartition(part, name) for part in parts]
        return found

    def read(self, partition: InputPartition, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records of a partition as the columns `names` of arrow_schema(), in this order."""
        from lockstep.features.shards.read import read_range, strict

        assert isinstance(partition, PublishedPartition)
        part, schema = partition.part, self.arrow_schema()
        with_split = self.options.split is None and SPLIT_COLUMN in names
        stored = [name for name in names if not (with_split and name == SPLIT_COLUMN)]
        # At least one column, which gives the number of rows: the ids if no other is needed.
        decode = strict(self.schema, stored or [self.schema.id_field.name])
        for batch in read_range(filesystem(part.url), part, decode):
            found = {name: batch.column(name) for name in stored}
            if with_split:
                found[SPLIT_COLUMN] = pa.repeat(pa.scalar(partition.split), len(batch))
            fields = pa.schema([schema.field(name) for name in names])
            yield pa.RecordBatch.from_arrays([found[name] for name in names], schema=fields)

    def __getstate__(self) -> dict[str, Any]:
        # The block tables of all shards stay with the driver: a task gets its own cut.
        return {**self.__dict__, "_cuts": {}}


def _splits(options: ReadOptions, manifest: DatasetManifest) -> tuple[str, ...]:
    if options.split is None:
        return tuple(sorted(manifest.splits))
    if options.split not in manifest.splits:
        raise ConfigError(
            f"{options.path} has no split `{options.split}`",
            got=options.split,
            allowed=", ".join(sorted(manifest.splits)),
            next_step='Correct .option("split", NAME), or leave it out for all of them.',
        )
    return (options.split,)
