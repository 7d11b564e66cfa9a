"""What a column must be before its values become records."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.compute as pc

from features.field import Field
from storage.errors import DataError

_ITEM_BYTES = {"uint8": 1, "float32": 4, "float64": 8, "int64": 8}
MAX_UINT64 = (1 << 64) - 1


def tensor_bytes(field: Field) -> int:
    """How many bytes a tensor of this field takes."""
    return math.prod(size for size in field.shape if size is not None) * _ITEM_BYTES[field.dtype]


def check_nulls(field: Field, column: pa.Array) -> None:
    """Raise DataError for a null in a column that must have none, or inside a list."""
    if column.null_count and not field.nullable:
        raise DataError(
            f"field `{field.name}` is null in {column.null_count} rows",
            got="null",
            allowed="a value in each row, since the schema says that it is not nullable",
            next_step="Declare the field nullable or drop those rows.",
        )
    if field.is_list and column.flatten().null_count:
        raise DataError(
            f"field `{field.name}` holds a null inside a list",
            got="null",
            allowed="values",
            next_step="Drop nulls from the lists.",
        )


def check_tensor_lengths(field: Field, column: pa.Array) -> None:
    """Raise DataError for a value of a tensor's column, (n,) bytes, that is longer or shorter than the tensor."""
    wanted, lengths = tensor_bytes(field), pc.binary_length(column)
    wrong = lengths.filter(pc.not_equal(lengths, wanted))
    if len(wrong):
        raise DataError(
            f"a tensor of field `{field.name}` has the wrong length",
            got=f"{wrong[0]} bytes",
            allowed=f"{wanted} bytes: shape {field.shape} of {field.dtype}",
            next_step="Correct the schema or the rows.",
        )


def as_recorded(field: Field, column: pa.Array) -> pa.Array:
    """The column as a record holds its values: decimals of a uint64 field as numbers, any other column as it is.

    Raises DataError for a decimal that is negative or beyond 64 bits.
    """
    kind = column.type
    if field.dtype != "uint64" or kind.equals(field.record_type):
        return column
    wanted = pa.large_list(pa.uint64()) if pa.types.is_large_list(kind) else field.record_type
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid:
        values = (column.flatten() if field.is_list else column).drop_null().to_pylist()
        wrong = next(value for value in values if not 0 <= value <= MAX_UINT64)
        raise DataError(
            f"field `{field.name}` holds a number that is no uint64",
            got=str(wrong),
            allowed=f"0 to {MAX_UINT64}",
            next_step="Correct or drop those rows, or declare the field as string.",
        ) from None
