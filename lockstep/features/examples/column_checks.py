"""Checks and casts of a column before its values become records."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.features.schema.fields import Field
from lockstep.storage.errors import CorruptionError, DataError

MAX_UINT64 = (1 << 64) - 1
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def check_nulls(field: Field, column: pa.Array) -> None:
    """Raise DataError for a null in a column that is not nullable, or inside a list."""
    if column.null_count and not field.nullable:
        raise DataError(
            f"field `{field.name}` is null in {column.null_count} rows",
            got="null",
            allowed="a value in each row: the schema says that the field is not nullable",
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
    """Raise DataError for a value in a column of tensors, (n,) bytes, that is longer or shorter than the tensor."""
    wanted, lengths = field.tensor_bytes, pc.binary_length(column)
    wrong = lengths.filter(pc.not_equal(lengths, wanted))
    if len(wrong):
        raise DataError(
            f"a tensor of field `{field.name}` has the wrong length",
            got=f"{wrong[0]} bytes",
            allowed=f"{wanted} bytes: shape {field.shape} of {field.dtype}",
            next_step="Correct the schema or the rows.",
        )


def check_unsigned(name: str, column: pa.Array, *, file: str, record: int) -> None:
    """Raise CorruptionError for a number beyond uint64 in a column of decimals or of lists of decimals.

    A decimal of 20 digits may exceed 64 bits, and later code assumes that none does. The error names `file` and
    `record`, the first one of the column.
    """
    ends = pc.min_max(column.flatten() if pa.types.is_list(column.type) else column)
    for end in (ends["min"].as_py(), ends["max"].as_py()):
        if end is not None and not 0 <= end <= MAX_UINT64:
            raise CorruptionError(
                f"field `{name}` has a number that is not a uint64",
                file=file,
                record=record,
                got=str(end),
                allowed=f"0 to {MAX_UINT64}",
            )


def as_recorded(field: Field, column: pa.Array) -> pa.Array:
    """The column with the types that records store: the declared Arrow type, or its variant with 64-bit offsets, and
    uint64 in place of decimals. No value is narrowed or rounded.

    Raises DataError for a decimal that is negative or exceeds 64 bits, and for a column of another type unless the
    declared type represents each of its values exactly.
    """
    column = _as_declared(field, column)
    kind = column.type
    if field.dtype != "uint64" or kind.equals(field.record_type):
        return column
    wanted = pa.large_list(pa.uint64()) if pa.types.is_large_list(kind) else field.record_type
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        values = (column.flatten() if field.is_list else column).drop_null().to_pylist()
        wrong = next((value for value in values if not 0 <= value <= MAX_UINT64), None)
        if wrong is None:
            raise _other_type(field, kind, str(error).splitlines()[0]) from None
        raise DataError(
            f"field `{field.name}` has a number that is not a uint64",
            got=str(wrong),
            allowed=f"0 to {MAX_UINT64}",
            next_step="Correct or drop those rows, or declare the field as string.",
        ) from None


def _as_declared(field: Field, column: pa.Array) -> pa.Array:
    kind, wanted = column.type, field.arrow_type
    if kind == wanted or kind == field.record_type:
        return column
    item = wanted.value_type if field.is_list else wanted
    if field.is_list and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        if kind.value_type in (item, _LARGE.get(item, item)):
            return column
    elif not field.is_list and kind == _LARGE.get(item):
        return column
    if not _widens(kind, wanted):
        raise _other_type(field, kind)
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise _other_type(field, kind, str(error).splitlines()[0]) from None


def _widens(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Arrow's checked cast keeps every value; it rounds floats without an error."""
    is_list = pa.types.is_list(wanted)
    if is_list != (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    if is_list:
        return kind.value_type == wanted.value_type or _widens(kind.value_type, wanted.value_type)
    if pa.types.is_dictionary(kind):
        return kind.value_type == wanted or _widens(kind.value_type, wanted)
    if pa.types.is_null(kind):
        return True
    if pa.types.is_integer(wanted):
        return pa.types.is_integer(kind)
    if pa.types.is_decimal(wanted):
        return pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    if pa.types.is_floating(wanted):
        return pa.types.is_floating(kind) and kind.bit_width <= wanted.bit_width
    if wanted == pa.string():
        return kind in (pa.large_string(), pa.string_view())
    return wanted == pa.binary() and (kind in (pa.large_binary(), pa.binary_view()) or _fixed_bytes(kind))


def _fixed_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _other_type(field: Field, kind: pa.DataType, got: str = "") -> DataError:
    return DataError(
        f"the column of field `{field.name}` has another type",
        got=f"{kind}" + (f": {got}" if got else ""),
        allowed=f"{field.arrow_type} for {field.dtype}, shape {field.shape}",
        next_step="Cast the column, or declare the field as it is.",
    )
