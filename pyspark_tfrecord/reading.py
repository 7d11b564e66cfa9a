"""The input at a path, a dataset or other TFRecord files, and the reader for both: Arrow batches, never rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from lockstep.storage.dataset.indexed import is_indexed, read_indexed
from lockstep.storage.dataset.layout import DatasetPaths
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, DataError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import basename, parent
from pyspark_tfrecord.options import ReadOptions
from pyspark_tfrecord.published import SPLIT_COLUMN, Published
from pyspark_tfrecord.types import arrow_schema, spark_schema


class Input(Protocol):
    """Something that can be read: a dataset or files without a manifest."""

    options: ReadOptions

    def arrow_schema(self) -> pa.Schema:
        """The columns that can be read."""

    def partitions(self) -> list[InputPartition]:
        """What each task reads."""

    def read(self, partition: InputPartition, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records of a partition as the columns `names` of arrow_schema()."""


def open_input(
    options: Mapping[str, str], schema: StructType | None = None, known: Sequence[str] | None = None
) -> Input:
    """Look at the path: a manifest makes it a dataset. `schema` is what the call asks for, None before that is known.
    `known` names the features that were found, if the schema is inferred: files of others must not have more.

    Raises ConfigError for invalid options, NotFoundError if nothing is there, DataError if it cannot be read.
    """
    read = ReadOptions.of(options)
    set_hadoop_settings(read.hadoop)
    if schema is not None and read.columns not in (None, tuple(schema.names)):
        raise ConfigError(
            "option `columns` and .schema(...) name different columns",
            got=f"{', '.join(read.columns or ())} and {', '.join(schema.names)}",
            allowed="one of the two",
            next_step="Leave the option out: .schema(...) chooses columns too.",
        )
    if schema is not None and not schema.names:
        raise ConfigError(
            ".schema(...) asks for no column",
            got="no names",
            allowed="one column or more",
            next_step="Name a column, or leave .schema(...) out; .count() needs none of them.",
        )
    where = DatasetPaths(read.path).manifest
    try:
        data = filesystem(read.path).read_bytes(where)
    except NotFoundError:
        data = None
    if data is None:
        _refuse_split_folder(read.path)
    if data is None or is_indexed(data, where):
        from pyspark_tfrecord.foreign import Foreign

        return Foreign(read, schema, None if data is None else read_indexed(data, where), known)
    found = Published(read, DatasetManifest.from_bytes(data, where))
    if schema is not None:
        _check(found, schema)
    return found


def _refuse_split_folder(path: str) -> None:
    """Raise ConfigError for the folder of one split of a dataset, which would be read as files of another program."""
    key, equals, split = basename(path).partition("=")
    if key != SPLIT_COLUMN or not equals:
        return
    dataset = parent(path)
    where = DatasetPaths(dataset).manifest
    try:
        data = filesystem(dataset).read_bytes(where)
    except NotFoundError:
        return
    if not is_indexed(data, where) and split in DatasetManifest.from_bytes(data, where).splits:
        raise ConfigError(
            f"{path} is one split of a dataset",
            got=f"the folder {basename(path)}",
            allowed=f"the dataset itself, {dataset}",
            next_step=f'Read it by .option("split", "{split}").load("{dataset}").',
        )


def selected(found: Input) -> pa.Schema:
    """The columns that option `columns` names, in its order, or all. Raises ConfigError for one that is not there."""
    have = found.arrow_schema()
    names = have.names if found.options.columns is None else found.options.columns
    for name in names:
        if name not in have.names:
            raise _no_column(found, name)
    return pa.schema([have.field(name) for name in names])


class Reader(DataSourceReader):
    """Reads the columns of `schema` from `found`, in any order."""

    def __init__(self, found: Input, schema: StructType) -> None:
        self._input = found
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """One for each range of a file; an empty one if there is nothing to read."""
        return self._input.partitions() or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The columns of the schema, a batch for some MiB of file."""
        set_hadoop_settings(self._input.options.hadoop)
        if type(partition) is InputPartition:
            return
        target = arrow_schema(self._schema)
        for batch in self._input.read(partition, target.names):
            columns = [batch.column(field.name) for field in target]
            yield pa.RecordBatch.from_arrays(
                [_as(column, field) for column, field in zip(columns, target, strict=True)], schema=target
            )


def _check(found: Published, schema: StructType) -> None:
    """Hold a schema that the call gives against the manifest's, name by name."""
    have = spark_schema(found.arrow_schema())
    for field in schema.fields:
        if field.name not in have.names:
            raise _no_column(found, field.name)
        if field.dataType != have[field.name].dataType:
            raise ConfigError(
                f"column `{field.name}` of {found.options.path} is of another type",
                got=field.dataType.simpleString(),
                allowed=have[field.name].dataType.simpleString(),
                next_step="Correct .schema(...), or leave it out: the manifest has it; cast the column afterwards.",
            )


def _as(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column in the Arrow type that Spark expects. Raises DataError where a value has no place in it."""
    if column.null_count and not field.nullable:
        raise DataError(
            f"column `{field.name}` holds a null",
            got="null",
            allowed="a value in each record, as .schema(...) says",
            next_step="Declare the column nullable.",
        )
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column `{field.name}` holds a value that does not fit {field.type}",
            got=str(error),
            allowed=str(field.type),
            next_step="Ask for bigint in .schema(...).",
        ) from None


def _no_column(found: Input, name: str) -> ConfigError:
    return ConfigError(
        f"{found.options.path} has no column `{name}`",
        got=name,
        allowed=", ".join(found.arrow_schema().names),
        next_step="Correct `columns` or .schema(...).",
    )
