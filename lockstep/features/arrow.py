"""Arrow arrays made from buffers that kernels fill, and the buffers of Arrow arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Read = Callable[[NDArray[np.int64]], pa.RecordBatch | None]
# A piece of 4 MiB may hold 100,000 records, and a schema hundreds of fields that all of them lack.
_RUN_BYTES = 64 << 20


class ArrowTable(Protocol):
    """What public calls ask of a pyarrow Table: pyarrow has no types, so its own name would accept any rows."""

    def to_pydict(self) -> dict[str, list[Any]]:
        """Return the columns as Python lists by their names."""


def array_of(kind: pa.DataType, rows: int, valid: NDArray[np.uint8] | None, *buffers: NDArray[Any]) -> pa.Array:
    """An Arrow array of `rows` values from its buffers; `valid` has one byte for each row, 0 for null."""
    bits, nulls = None, 0
    if valid is not None and (nulls := rows - int(np.count_nonzero(valid))):
        bits = pa.py_buffer(bits_of(valid))
    return pa.Array.from_buffers(kind, rows, [bits, *(pa.py_buffer(each) for each in buffers)], null_count=nulls)


def in_runs(offsets: NDArray[np.int64], rows: int, read: Read) -> pa.RecordBatch | None:
    """Call `read` for at most `rows` records at a time and join the batches; None as soon as `read` returns None.

    `offsets` (n + 1,) are where the records begin and the last one ends; `read` gets a part of them. This bounds the
    memory that `read` takes for each record, however short the records are.
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
    """How many records to read at once if each takes `row_bytes` of memory besides its values."""
    return max(1, _RUN_BYTES // max(1, row_bytes))


def of_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column cast to `kind`, which holds all its values; itself if it has that type: Arrow's cast takes 2 us."""
    return column if column.type == kind else column.cast(kind)


def bits_of(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of 0 and 1 packed as Arrow's bits."""
    return np.packbits(values, bitorder="little")


def checked_text(column: pa.Array) -> pa.Array | None:
    """The column, or None if it is text that is not UTF-8."""
    if pa.types.is_string(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return None
    return column


def flat(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The offsets (n + 1,), from 0, and the bytes of a column of strings or binaries, slices included.

    Bytes are copied only from Arrow's string_view and binary_view. A null has no bytes.
    """
    wide = values.cast(pa.large_binary())
    _, ends, content = wide.buffers()
    offsets = np.frombuffer(ends, dtype=np.int64, count=len(wide) + 1, offset=wide.offset * 8)
    data = np.frombuffer(content, dtype=np.uint8) if content is not None else np.zeros(0, dtype=np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]
