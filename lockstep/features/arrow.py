"""Arrow arrays from the buffers that kernels fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Read = Callable[[NDArray[np.int64]], pa.RecordBatch | None]
# A piece of 4 MiB may hold 100,000 records, and a schema hundreds of fields that all of them lack.
_RUN_BYTES = 64 << 20


def array_of(kind: pa.DataType, rows: int, valid: NDArray[np.uint8] | None, *buffers: NDArray[Any]) -> pa.Array:
    """An Arrow array of `rows` from its buffers; `valid` has a byte a row, 1 for a value."""
    bits, nulls = None, 0
    if valid is not None and (nulls := rows - int(np.count_nonzero(valid))):
        bits = pa.py_buffer(bits_of(valid))
    return pa.Array.from_buffers(kind, rows, [bits, *(pa.py_buffer(each) for each in buffers)], null_count=nulls)


def in_runs(offsets: NDArray[np.int64], rows: int, read: Read) -> pa.RecordBatch | None:
    """What `read` makes of records, of which it gets `offsets` (n + 1,): `rows` at a time, so that what it needs for
    each record is bounded however short they are. None where it gives None.
    """
    if len(offsets) - 1 <= rows:
        return read(offsets)
    batches = []
    for start in range(0, len(offsets) - 1, rows):
        batch = read(offsets[start : start + rows + 1])
        if batch is None:
            return None
        batches.append(batch)
    return pa.concat_batches(batches)


def rows_at_once(row_bytes: int) -> int:
    """How many records to read at once where each needs `row_bytes` for itself."""
    return max(1, _RUN_BYTES // max(1, row_bytes))


def of_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in a type that holds all of its values; Arrow's cast to the same type takes 2 microseconds."""
    return column if column.type == kind else column.cast(kind)


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


def flat(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The offsets (n + 1,) and bytes of strings or binaries with offsets of any width, not copied unless they are
    views; nulls take no bytes.
    """
    wide = values.cast(pa.large_binary())
    _, ends, content = wide.buffers()
    offsets = np.frombuffer(ends, dtype=np.int64, count=len(wide) + 1, offset=wide.offset * 8)
    data = np.frombuffer(content, dtype=np.uint8) if content is not None else np.zeros(0, dtype=np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]
