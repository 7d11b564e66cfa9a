"""Rows of Parquet files that other programs wrote, as rows of a dataset: declared types, partitions, sample ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lockstep.features.arrow import checked_text
from lockstep.features.examples.column_checks import as_recorded, check_nulls, check_tensor_lengths
from lockstep.features.sample_id import sample_ids, text_of
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.shards.read import placed
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import ShardInfo
from lockstep.storage.errors import DataError
from lockstep.storage.urls import join

_ROWS = 1 << 16  # whose file names are hashed at once


@dataclass(frozen=True)
class IndexedRows:
    """Makes the records of one file.

    `file` is its URL, for errors; `path` its path below the dataset, which is in the ids of files without
    `id_columns`; `partition` the texts of its partition columns, None for null.
    """

    schema: Schema
    id_columns: tuple[str, ...]
    file: str
    path: str
    partition: Mapping[str, str | None]
    only: Collection[str] | None = None
    """The columns of the schema to make; None: all."""

    @classmethod
    def of(
        cls,
        dataset_url: str,
        manifest: DatasetManifest,
        shard: ShardInfo,
        schema: Schema,
        only: Collection[str] | None = None,
    ) -> Self | None:
        """The rows of a shard of the dataset; None if Lockstep wrote it."""
        if manifest.indexed is None:
            return None
        partition = dict(shard.partition or ())
        return cls(schema, manifest.indexed, join(dataset_url, shard.path), shard.path, partition, only)

    def columns(self, there: Collection[str]) -> list[str]:
        """The columns to read of the file, which has the columns `there`."""
        made = self._made
        of_ids = self.id_columns if any(field.kind == "id" for field in made) else ()
        wanted = dict.fromkeys([*(field.name for field in made if field.kind != "id"), *of_ids])
        return [name for name in wanted if name in there and name not in self.partition]

    def batch(self, rows: pa.Table, first: int) -> pa.RecordBatch:
        """Turn rows of the file, whose first one is row `first`, into columns of the schema.

        Raises DataError naming file and column for values that the schema does not allow, and for a null id.
        """
        with placed(self.file, first):
            columns = [self._column(field, rows, first) for field in self._made]
        kinds = self.schema.arrow_schema()
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([kinds.field(field.name) for field in self._made]))

    def ids(self, rows: pa.Table, first: int) -> NDArray[np.int64]:
        """The sample id of each row, (n,) int64: of the id columns as `lockstep etl_table` makes it, else of the file's
        path and the row's number.
        """
        if self.id_columns:
            columns = [self._id_text(name, rows) for name in self.id_columns]
            return sample_ids(columns, np.zeros(len(rows), np.int64))
        parts = [np.zeros(0, np.int64)]
        for start in range(first, first + len(rows), _ROWS):
            numbers = np.arange(start, min(start + _ROWS, first + len(rows)))
            paths = pa.repeat(pa.scalar(self.path), len(numbers))
            parts.append(sample_ids([paths, pa.array(numbers).cast(pa.string())], np.zeros(len(numbers), np.int64)))
        return np.concatenate(parts)

    @property
    def _made(self) -> list[Field]:
        return [field for field in self.schema if self.only is None or field.name in self.only]

    def _column(self, field: Field, rows: pa.Table, first: int) -> pa.Array:
        if field.kind == "id":
            return pa.array(self.ids(rows, first))
        if field.name in self.partition:
            column = pa.repeat(_scalar(field, self.partition[field.name]), len(rows))
        elif field.name in rows.column_names:
            column = _whole(field.name, rows)
        else:
            column = pa.nulls(len(rows), field.arrow_type)
        return as_declared(field, column)

    def _id_text(self, name: str, rows: pa.Table) -> pa.Array:
        if name in self.partition:
            column = pa.repeat(pa.scalar(self.partition[name], pa.string()), len(rows))
        else:
            column = _hashable(_whole(name, rows))
        if column.null_count:
            place = np.flatnonzero(np.asarray(column.is_null()))[0]
            raise DataError(
                f"id column `{name}` is null",
                got=f"null in row {place} of these",
                allowed="a value in each row",
                next_step="Name other --id-columns, or none: then file and row are the id.",
            )
        return text_of(_checked(name, column))


def as_declared(field: Field, column: pa.Array) -> pa.Array:
    """A column of another program with the field's type: no value is rounded, and a label that is the text of its class
    or a number 0 and 1 becomes that class.

    Raises DataError for another type, and for values that the field does not allow.
    """
    if field.kind == "label":
        column = _classes(field, column)
    check_nulls(field, column)
    column = as_recorded(field, column)
    if field.is_tensor:
        check_tensor_lengths(field, column)
    column = column.cast(field.arrow_type)
    if field.kind == "label" and field.num_classes is not None and field.dtype == "int64" and len(column):
        ends = pc.min_max(column)
        worst = min(ends["min"].as_py(), field.num_classes - ends["max"].as_py() - 1)
        if worst < 0:
            raise _no_class(field, f"{ends['min']} to {ends['max']}", f"0 to {field.num_classes - 1}")
    return _checked(field.name, column)


def _classes(label: Field, column: pa.Array) -> pa.Array:
    kind, names = column.type, label.class_names
    if names is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()):
        texts = column.cast(pa.string())
        found = pc.index_in(texts, value_set=pa.array(names))
        if found.null_count > column.null_count:
            other = texts.filter(pc.and_(found.is_null(), column.is_valid()))[0]
            raise _no_class(label, repr(other.as_py())[:200], ", ".join(names)[:1000])
        return pc.equal(found, 1) if label.dtype == "bool" else found
    if label.dtype == "bool" and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        yes, no = pc.equal(column, 1), pc.equal(column, 0)
        if not pc.all(pc.or_(yes, no), min_count=0).as_py():
            raise _no_class(label, "another number", "0 and 1")
        return yes
    return column


def _no_class(label: Field, got: str, allowed: str) -> DataError:
    return DataError(
        f"label `{label.name}` has a value that is none of its classes",
        got=got,
        allowed=allowed,
        next_step="Correct class_names or num_classes in the schema, or build a dataset by lockstep etl_table --query.",
    )


def group_starts(metadata: pq.FileMetaData) -> NDArray[np.int64]:
    """The number of the first row of each row group, and of all rows: (groups + 1,) int64."""
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def groups_of(starts: NDArray[np.int64], first: int, count: int) -> tuple[range, int]:
    """The row groups that hold `count` rows, one or more, from row `first` on, and how many other rows come first."""
    group = int(np.searchsorted(starts, first, side="right")) - 1
    return range(group, int(np.searchsorted(starts, first + count, side="left"))), first - int(starts[group])


def _whole(name: str, rows: pa.Table) -> pa.Array:
    """The column as one array, whose values are not in a dictionary."""
    column = rows.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # of no rows, or of more bytes than Arrow's offsets count
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    return whole


def _scalar(field: Field, text: str | None) -> pa.Scalar:
    """A partition's value as one of the field."""
    reads: dict[str, Any] = {"int64": int, "float64": float, "string": str}
    return pa.scalar(None if text is None else reads[field.dtype](text), field.arrow_type)


def _hashable(column: pa.Array) -> pa.Array:
    """An id column as `lockstep etl_table` hashes it: times in microseconds, rounded down, and those with a zone as
    numbers since 1970.
    """
    kind = column.type
    if pa.types.is_timestamp(kind):
        micros = pc.floor_temporal(column, unit="microsecond").cast(pa.timestamp("us", kind.tz))
        return micros.cast(pa.int64()) if kind.tz else micros
    if kind == pa.string_view():
        return column.cast(pa.string())
    if kind == pa.binary_view() or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.string() if pa.types.is_large_string(kind) else pa.binary())
    return column


def _checked(name: str, column: pa.Array) -> pa.Array:
    if checked_text(column.flatten() if pa.types.is_list(column.type) else column) is None:
        raise DataError(
            f"column `{name}` holds text that is not UTF-8",
            got="bytes that are no UTF-8",
            allowed="UTF-8 in columns of text",
            next_step="Exclude it by --exclude, declare it as bytes in a --schema, or write the file again.",
        )
    return column
