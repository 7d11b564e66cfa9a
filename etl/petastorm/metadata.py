"""`--petastorm`: the metadata files from which Petastorm's make_reader takes a dataset's fields and row groups.

`_common_metadata` holds the columns as a Parquet footer with two entries: the row groups of each file, and a pickle of
a Unischema. One is at the root, for a reader of all splits with the column `split`, and one in each split. Neither
reader of Petastorm can read a directory whose file lacks one of the entries, so each file has both.
"""

from __future__ import annotations

import io
import keyword
import pickle
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest_entries import FileInfo, SplitInfo
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import ConfigError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join

NAME = "_common_metadata"
SPLIT_COLUMN = "split"
UNISCHEMA = b"dataset-toolkit.unischema.v1"
ROW_GROUPS = b"dataset-toolkit.num_row_groups_per_file.v1"


def check_petastorm(schema: Schema, fmt: str) -> None:
    """Raise ConfigError if Petastorm's make_reader cannot read a dataset of this schema and format.

    It makes a namedtuple of each row, so names must be identifiers of Python.
    """
    if fmt != "parquet":
        raise ConfigError(
            "--petastorm is for Parquet", got=f"--format {fmt}", allowed="--format parquet", next_step="Change one."
        )
    for field in schema:
        if not field.name.isidentifier() or keyword.iskeyword(field.name) or field.name == SPLIT_COLUMN:
            raise ConfigError(
                f"Petastorm's make_reader cannot name field `{field.name}`",
                got=repr(field.name),
                allowed=f"letters, digits and `_`, no word of Python's, not `{SPLIT_COLUMN}`",
                next_step="Rename the column, or remove --petastorm.",
            )


def write_petastorm_metadata(
    fs: FileSystem, root_url: str, schema: Schema, splits: Mapping[str, SplitInfo]
) -> dict[str, FileInfo]:
    """Write `_common_metadata` at the root and in each split; returns the manifest's entries by path.

    The same bytes for the same schema and shards. Raises ConfigError as check_petastorm does, and ExistsError.
    """
    shards = [shard for split in splits.values() for shard in split.shards]
    check_petastorm(schema, "parquet" if all(shard.path.endswith(".parquet") for shard in shards) else "tfrecord")
    groups = {shard.path: len(shard.block_offsets) for shard in shards}
    contents = {NAME: _footer(schema, groups, with_split=True)}
    for name, split in splits.items():
        folder = f"{SPLIT_COLUMN}={name}/"
        inside = {shard.path.removeprefix(folder): groups[shard.path] for shard in split.shards}
        contents[folder + NAME] = _footer(schema, inside, with_split=False)
    for path, data in contents.items():
        write_file(fs, join(root_url, path), data)
    return {path: FileInfo(len(data), sha256_hex(data)) for path, data in contents.items()}


def _footer(schema: Schema, groups: Mapping[str, int], *, with_split: bool) -> bytes:
    entries = {ROW_GROUPS: canonical_bytes(dict(groups)), UNISCHEMA: _pickled(schema, with_split=with_split)}
    sink = io.BytesIO()
    pq.write_metadata(schema.arrow_schema().with_metadata(entries), sink)
    return sink.getvalue()


def _pickled(schema: Schema, *, with_split: bool) -> bytes:
    from lockstep.etl.petastorm.imports import enable

    enable()
    from petastorm.unischema import Unischema, UnischemaField

    # Interned, since a pickle refers to repeated objects by identity: otherwise equal schemas might differ in bytes.
    fields = [UnischemaField(SPLIT_COLUMN, np.str_, (), None, False)] if with_split else []
    for field in schema:
        shape = (None,) if field.is_list else ()
        fields.append(UnischemaField(sys.intern(field.name), _numpy_type(field), shape, None, field.nullable))
    sink = io.BytesIO()
    _Pickler(sink, protocol=4).dump(Unischema("lockstep", fields))
    return sink.getvalue()


def _numpy_type(field: Field) -> type:
    """The numpy type that Petastorm uses for a field's values."""
    kind = field.arrow_type
    if pa.types.is_list(kind):
        kind = kind.value_type
        if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_decimal(kind):
            return np.object_  # np.str_ would make one text of the whole list, and Decimal takes none
    if pa.types.is_decimal(kind):
        return Decimal
    if pa.types.is_string(kind):
        return np.str_
    if pa.types.is_binary(kind):
        return np.bytes_  # tensors too: Petastorm has no codec for plain bytes, see lockstep.etl.petastorm.metadata
    return np.dtype(kind.to_pandas_dtype()).type


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # numpy 1 knows its bool by this name only, which numpy 2 has too.
        return "bool_" if obj is np.bool_ else NotImplemented


def tensors(schema: Schema, columns: Sequence[str] | None = None) -> Any:
    """A TransformSpec for make_reader or make_batch_reader that makes arrays of the tensors of `schema`.

    Each becomes an array of its declared dtype and shape, (n, *shape) in a batch. `columns` are the names that the
    reader gets as `schema_fields`, None where it gets none. Call lockstep.etl.petastorm.enable() before. Raises
    ConfigError for a column that the schema lacks.
    """
    from petastorm import TransformSpec

    wanted = list(schema) if columns is None else [schema[name] for name in columns]
    shapes = {field.name: (np.dtype(field.dtype), field.shape) for field in wanted if field.is_tensor}
    return TransformSpec(
        partial(_decode, shapes),
        edit_fields=[(name, dtype.type, shape, False) for name, (dtype, shape) in shapes.items()],
    )


def _decode(shapes: dict[str, tuple[np.dtype[Any], tuple[int | None, ...]]], rows: Any) -> Any:
    """Decode tensors in a row (dict) of make_reader, or in the rows (DataFrame) of make_batch_reader."""
    for name, (dtype, shape) in shapes.items():
        if isinstance(rows, dict):
            rows[name] = np.frombuffer(rows[name], dtype.newbyteorder("<")).astype(dtype).reshape(shape)
            continue
        data = b"".join(rows[name])
        rows[name] = list(np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(len(rows), *shape))
    return rows
