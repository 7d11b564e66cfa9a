"""Baking: declared columns to columns of a model's inputs, stored in the form of `stored_form`
(lockstep/features/schema/encodings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.encode.encoder import plan_of
from lockstep.features.encode.transforms import Columns, columns_of, kept_of, sequence_values
from lockstep.features.schema.encodings import BAKED, RAW_KEYS, fitted_part, has_ids, stored_form
from lockstep.features.schema.fields import Field
from lockstep.features.schema.fitted import Fitted
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import TensorSpec
from lockstep.storage.errors import ConfigError

BATCH_BYTES = 64 << 20  # of decoded images and scaled tensors at once: they are larger than the columns they come from


def baked_field(field: Field, ids: int | None, fitted: Fitted | None) -> Field:
    """The field as it is stored with its encoding baked in; itself if baking does not change it.

    `ids` is the number of ids if it stores ids; `fitted` the statistics of its encoding if these are fitted.
    """
    form = stored_form(field.dtype, field.shape, field.encoding)
    if field.kind != "feature" or form is None:
        return field
    declared = field.to_json()
    encoding: dict[str, Any] = {"kind": BAKED, "raw": {key: declared[key] for key in RAW_KEYS}}
    if ids is not None:
        encoding["ids"] = ids
    if fitted is not None:
        encoding["fitted"] = {"file": field.fitted_file, "splits": list(fitted.fitted_on)}
    return Field(name=field.name, dtype=form[0], shape=form[1], encoding=encoding)


def raw_schema(schema: Schema) -> Schema:
    """The declared schema; its Encoder, with the fitted files, turns raw rows into what the baked shards store."""
    return replace(schema, fields=tuple(field.declared for field in schema))


Bake = Callable[[pa.Array], pa.Array]


def check_bakeable(schema: Schema) -> None:
    """Raise ConfigError for a feature that cannot be fed to a model, and if baking would change no feature."""
    for field in schema.features:
        if fitted_part(field.encoding) is None:
            plan_of(field, None)
    if not any(stored_form(field.dtype, field.shape, field.encoding) for field in schema.features):
        raise ConfigError(
            "--bake has nothing to do",
            got=f"features that a model takes unchanged: {', '.join(field.name for field in schema.features)}"[:500],
            allowed="a feature with an encoding, or a number other than float32",
            next_step="Leave --bake out.",
        )


def check_declared(schema: Schema) -> None:
    """Raise ConfigError for the schema of a baked dataset, where a declared schema is needed."""
    baked = [field.name for field in schema if field.is_baked]
    if baked:
        raise ConfigError(
            f"field `{baked[0]}` is baked: its values are a model's inputs, encoded with another dataset's statistics",
            got=f"{len(baked)} baked fields",
            allowed="a schema that declares raw columns",
            next_step="For raw rows use lockstep.features.encode.bake.raw_schema(schema); for ids and "
            "inputs declare plain numbers.",
        )


class Baker:
    """Makes columns of a baked dataset from those of a declared schema.

    `fitted` has the statistics of each field with a fitted encoding. Raises ConfigError and DataError as Encoder does.
    """

    def __init__(self, schema: Schema, fitted: Mapping[str, Fitted]) -> None:
        self._bakes: dict[str, Bake] = {}
        fields = []
        for field in schema:
            found = fitted.get(field.name)
            made = field
            if field.kind == "feature" and stored_form(field.dtype, field.shape, field.encoding) is not None:
                spec = plan_of(field, found)[field.name].spec
                made = baked_field(field, _ids(field, spec), found if fitted_part(field.encoding) else None)
                self._bakes[field.name] = _bake(field, made, found)
            fields.append(made)
        self.schema = replace(schema, fields=tuple(fields))
        self._row_bytes = sum(field.tensor_bytes for field in self.schema if field.is_baked and field.is_tensor)

    def batches(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows as columns of `schema`, in parts of BATCH_BYTES of tensors."""
        rows = max(1, BATCH_BYTES // self._row_bytes) if self._row_bytes else max(1, len(batch))
        for start in range(0, len(batch), rows):
            part = batch.slice(start, rows)
            columns = [self._column(field, part.column(field.name)) for field in self.schema]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema.arrow_schema())

    def _column(self, field: Field, column: pa.Array) -> pa.Array:
        bake = self._bakes.get(field.name)
        return column if bake is None else bake(column)


def _ids(field: Field, spec: TensorSpec) -> int | None:
    if not has_ids(field.encoding):
        return None
    return spec.ids if spec.ids is not None else spec.shape[0] + 1


def _bake(field: Field, made: Field, fitted: Fitted | None) -> Bake:
    encoding = field.encoding or {}
    if encoding.get("kind") == "sequence":
        of = encoding.get("of")
        columns = None if of is None else columns_of(field, of, fitted)[0]
        return lambda column: _cut(field, made, columns, column)
    if has_ids(field.encoding):
        columns, size = columns_of(field, encoding, fitted)
        if field.is_list:
            return lambda column: _each_once(made, columns(column.flatten()), column, size)
        return lambda column: pa.array(columns(column) + 1)
    transform = plan_of(field, fitted)[field.name].whole
    if made.is_tensor:
        return lambda column: _as_bytes(made, transform(column))
    return lambda column: pa.array(transform(column).ravel())  # (n, 1) -> (n,)


def _cut(field: Field, made: Field, columns: Columns | None, column: pa.Array) -> pa.Array:
    """The values of each row's sequence, ragged."""
    assert field.encoding is not None
    starts, counts = kept_of(field.encoding, column)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    values = sequence_values(field, columns, column)
    return _lists(made, values[np.repeat(starts, counts) + within], counts)


def _each_once(made: Field, found: NDArray[np.int64], column: pa.Array, size: int) -> pa.Array:
    """The distinct ids of each row's values in increasing order, without those of unknown values."""
    rows = np.repeat(np.arange(len(column)), np.asarray(pc.list_value_length(column)))
    used = found >= 0
    # Row and column as one number, by which np.unique sorts ids within each row.
    at, place = np.divmod(np.unique(rows[used] * size + found[used]), size)
    return _lists(made, place + 1, np.bincount(at, minlength=len(column)))


def _lists(made: Field, values: NDArray[Any], counts: NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=made.arrow_type)


def _as_bytes(made: Field, tensors: NDArray[Any]) -> pa.Array:
    """Turn (n, *shape) into (n,) bytes, little-endian in C order."""
    data = np.ascontiguousarray(tensors, dtype=np.dtype(made.dtype).newbyteorder("<"))
    offsets = np.arange(len(data) + 1, dtype=np.int32) * (data[:1].nbytes)
    return pa.Array.from_buffers(pa.binary(), len(data), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
