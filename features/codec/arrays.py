"""Arrow arrays from the buffers that kernels fill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def array_of(kind: pa.DataType, rows: int, valid: NDArray[np.uint8] | None, *buffers: NDArray[Any]) -> pa.Array:
    """An Arrow array of `rows` from its buffers; `valid` has a byte a row, 1 for a value."""
    bits, nulls = None, 0
    if valid is not None and (nulls := rows - int(np.count_nonzero(valid))):
        bits = pa.py_buffer(bits_of(valid))
    return pa.Array.from_buffers(kind, rows, [bits, *(pa.py_buffer(each) for each in buffers)], null_count=nulls)


def bits_of(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of 0 and 1 as Arrow's bits."""
    return np.packbits(values, bitorder="little")


def checked_text(column: pa.Array) -> pa.Array | None:
    """The column, or None for text that is not UTF-8."""
    if pa.types.is_string(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return None
    return column
