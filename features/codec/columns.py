"""Arrow columns as addresses for the kernels, checked first: what passes here can be encoded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from features.codec.layout import BOOL, BOOL_LIST, BYTES, BYTES_LIST, TENSOR, Layout
from features.column_checks import as_recorded, check_nulls, check_tensor_lengths
from features.schema import Field
from storage.errors import DataError

# The columns of a description: where the bits of validity begin (0 where nothing is null) and how many of them come
# before the first row; the values, for BOOL with the bits before the first; the offsets of lists and of byte values, in
# 4 or 8 bytes each.
VALID, VALID_BIT, DATA, DATA_BIT, LISTS, LISTS_WIDTH, ENDS, ENDS_WIDTH = range(8)
DESCRIPTION_COLUMNS = 8

_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def describe(layout: Layout, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], list[pa.Array]]:
    """Where the values of a batch lie, (k, 8) int64, and the columns that own them: keep these while it is in use.

    Columns are found by name. Raises DataError for a null where none may be or within a list, a tensor of the wrong
    length, a decimal that is no uint64, and a column of another type, unless every value of it is exactly one of the
    declared type.
    """
    found = np.zeros((len(layout.fields), DESCRIPTION_COLUMNS), dtype=np.int64)
    columns = [as_recorded(field, as_declared(field, batch.column(field.name))) for field in layout.fields]
    for row, field, kind, column in zip(found, layout.fields, layout.kinds.tolist(), columns, strict=True):
        check_nulls(field, column)
        if column.null_count:
            row[VALID], row[VALID_BIT] = column.buffers()[0].address, column.offset
        values = column
        if field.is_list:
            row[LISTS], row[LISTS_WIDTH] = _offsets(column)
            values = column.values
        data = values.buffers()[-1]
        address, start = (0 if data is None else data.address), values.offset
        if kind in (BYTES, TENSOR, BYTES_LIST):
            row[DATA] = address
            row[ENDS], row[ENDS_WIDTH] = _offsets(values)
        elif kind in (BOOL, BOOL_LIST):
            row[DATA], row[DATA_BIT] = address, start
        else:
            row[DATA] = address + start * (values.type.bit_width // 8)
        if kind == TENSOR:
            check_tensor_lengths(field, column)
    return found, columns


def as_declared(field: Field, column: pa.Array) -> pa.Array:
    """The column in its declared Arrow type, or in the one with 64-bit offsets; nothing is narrowed or rounded."""
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
    """Whether Arrow's checked cast changes no value: it rounds floats without a word."""
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


def _offsets(column: pa.Array) -> tuple[int, int]:
    """Where a column's first offset lies, and how wide each is."""
    large = pa.types.is_large_list(column.type) or column.type in _LARGE.values()
    buffer, width = column.buffers()[1], 8 if large else 4
    return (0 if buffer is None else buffer.address + column.offset * width), width


def _other_type(field: Field, kind: pa.DataType, got: str = "") -> DataError:
    return DataError(
        f"the column of field `{field.name}` has another type",
        got=f"{kind}" + (f": {got}" if got else ""),
        allowed=f"{field.arrow_type} for {field.dtype}, shape {field.shape}",
        next_step="Cast the column, or declare the field as it is.",
    )
