"""Arrow columns as addresses for the kernels, checked first: what passes here can be encoded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.examples.column_checks import as_recorded, check_nulls, check_tensor_lengths
from lockstep.features.examples.layout import BOOL, BOOL_LIST, BYTES, BYTES_LIST, TENSOR, Layout

# The columns of a description: where the bits of validity begin (0 where nothing is null) and how many of them come
# before the first row; the values, for BOOL with the bits before the first; the offsets of lists and of byte values, in
# 4 or 8 bytes each.
VALID, VALID_BIT, DATA, DATA_BIT, LISTS, LISTS_WIDTH, ENDS, ENDS_WIDTH = range(8)
DESCRIPTION_COLUMNS = 8


def describe(layout: Layout, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], list[pa.Array]]:
    """Where the values of a batch lie, (k, 8) int64, and the columns that own them: keep these while it is in use.

    Columns are found by name. Raises DataError for a null where none may be or within a list, a tensor of the wrong
    length, a decimal that is no uint64, and a column of another type, unless every value of it is exactly one of the
    declared type.
    """
    found = np.zeros((len(layout.fields), DESCRIPTION_COLUMNS), dtype=np.int64)
    columns = [as_recorded(field, batch.column(field.name)) for field in layout.fields]
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


def _offsets(column: pa.Array) -> tuple[int, int]:
    """Where a column's first offset lies, and how wide each is."""
    large = pa.types.is_large_list(column.type) or column.type in (pa.large_string(), pa.large_binary())
    buffer, width = column.buffers()[1], 8 if large else 4
    return (0 if buffer is None else buffer.address + column.offset * width), width
