"""Reading TFRecord files of other programs: by ranges if lockstep index has indexed them, else file by file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import foreign_field
from lockstep.features.shards.blocks import read_gzip
from lockstep.features.shards.foreign_files import ForeignFile, find_files, infer_columns, read_file, sample
from lockstep.features.shards.ranges import ShardRange, cut
from lockstep.features.shards.read import Lenient, read_range
from lockstep.storage.dataset.indexed import IndexedManifest
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from pyspark_tfrecord.options import ReadOptions
from pyspark_tfrecord.types import columns_of


@dataclass
class FilePartition(InputPartition):
    """A whole file: one without an index, or a gzip file, with its manifest entry if there is one."""

    url: str
    info: ShardInfo | None = None


@dataclass
class RangePartition(InputPartition):
    """A range of an indexed file."""

    part: ShardRange


class Foreign:
    """The files at options.path. `schema` is what the call asks for; without it the fields are inferred. `known`, if
    the call leaves the schema to us, names all features that records may have.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType | None,
        manifest: IndexedManifest | None,
        known: Sequence[str] | None = None,
    ) -> None:
        for name, value in (("split", options.split), ("verify", None if options.verify == "records" else "full")):
            if value is not None and (name == "split" or manifest is None):
                raise ConfigError(
                    f"{options.path} has no manifest of a dataset, so option `{name}` says nothing there",
                    got=f"{name} = {value}",
                    allowed="a dataset that an ETL job published",
                    next_step="Leave the option out.",
                )
        self.options, self._known = options, known
        self._manifest = manifest
        self._files: Sequence[ForeignFile] = () if manifest else find_files(options.path, options.path_glob)
        self.fields = self._inferred() if schema is None else _declared(schema)

    def arrow_schema(self) -> pa.Schema:
        """The columns that can be read."""
        return pa.schema([pa.field(field.name, field.arrow_type, nullable=field.nullable) for field in self.fields])

    def partitions(self) -> list[InputPartition]:
        """One for each range of an indexed file, else one for each file."""
        if self._manifest is None:
            return [FilePartition(file.url) for file in self._files]
        found: list[InputPartition] = []
        size = None if self.options.verify == "full" else self.options.partition_bytes
        for file in self._manifest.files:
            url = join(self.options.path, file.path)
            if file.path in self._manifest.gzip:
                found.append(FilePartition(url, file))
            else:
                found += [RangePartition(part) for part in cut(url, file, self._manifest.block_records, size)]
        return found

    def read(self, partition: InputPartition, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records of a partition as the columns `names` of arrow_schema()."""
        decode = Lenient([field for field in self.fields if field.name in names], self._known)
        if isinstance(partition, FilePartition):
            fs, url = filesystem(partition.url), partition.url
            if partition.info is None:
                return read_file(fs, url, decode)
            return read_gzip(fs, url, partition.info, decode, full=self.options.verify == "full")
        assert isinstance(partition, RangePartition)
        return read_range(filesystem(partition.part.url), partition.part, decode)

    def _inferred(self) -> tuple[Field, ...]:
        if self._manifest is None:
            columns = infer_columns(self._files, sample(self._files, self.options.sample_records))
        else:
            columns = list(self._manifest.columns)
        return tuple(foreign_field(*column) for column in columns)

    def __getstate__(self) -> dict[str, Any]:
        # Names and blocks of all files stay with the driver: a task gets its own.
        return {**self.__dict__, "_manifest": None, "_files": ()}


def _declared(schema: StructType) -> tuple[Field, ...]:
    """The fields to decode for the columns that the call asks for: a double is read from tf.Example's float."""
    return tuple(
        foreign_field(column.name, "float32" if column.dtype == "float64" else column.dtype, column.is_list)
        for column in columns_of(schema)
    )
