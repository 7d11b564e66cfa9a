"""RecordDecoder: a buffer of whole framed records to columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from features.codec.arrays import array_of, bits_of, checked_text, in_runs, of_type, rows_at_once
from features.codec.layout import BOOL, BOOL_LIST, BYTES, FIXED_LIST, INT, INT_LIST, TENSOR, Layout
from features.example import decode_batch
from features.schema import Field, Schema
from features.wire import BytesLike
from storage.tfrecord import FRAMING_BYTES, parse_records, record_offsets

_MAX_OFFSET = (1 << 31) - 1
_CELL_BYTES = 16  # where a value of variable size begins, and its size


@dataclass(frozen=True, slots=True)
class Frames:
    """Records of several buffers, `counts` of each: their columns; of those in place, addresses or values."""

    batch: pa.RecordBatch
    places: dict[str, NDArray[np.int64]]
    values: dict[str, NDArray[np.uint8]]
    counts: tuple[int, ...]
    buffers: tuple[NDArray[np.uint8], ...]


class RecordDecoder:
    """Reads what RecordEncoder wrote; both checksums of each record and its form are checked.

    The kernels are compiled at the first call, or found compiled; the GIL is released while they run. Bytes that are
    not exactly of the encoder's form go to features.example.decode_batch, which takes them or says what is wrong.
    `columns` names those that are wanted (all where None): the others are looked at, but not kept. Of fields in
    `in_place`, which must not be nullable, `decode_frames` makes no columns: of tensors it tells where they lie, of
    int64 and floats it gives the values.
    """

    def __init__(self, schema: Schema, columns: Sequence[str] | None = None, in_place: Collection[str] = ()) -> None:
        self._schema, self._layout = schema, Layout.of(schema)
        assert not any(schema[name].nullable or schema[name].is_list for name in in_place)
        self._in_place = frozenset(in_place)
        wanted = set(schema.arrow_schema().names if columns is None else columns)
        self._wanted = {field.name: number for number, field in enumerate(self._layout.fields) if field.name in wanted}
        self._names = [name for name in schema.arrow_schema().names if name in self._wanted]
        kept = [field for field in schema.arrow_schema() if field.name in self._wanted]
        self._arrow = pa.schema([field for field in kept if field.name not in self._in_place])
        kinds = self._layout.kinds.tolist()
        # A tensor that is always there has a place of its own; one that may be null takes no room where it is.
        apart = [
            number
            for number, (field, kind) in enumerate(zip(self._layout.fields, kinds, strict=True))
            if kind >= INT_LIST
            or kind == BYTES
            or (kind == TENSOR and (field.nullable or field.name in self._in_place))
        ]
        self._variable = {number: row for row, number in enumerate(apart)}
        self._rows_at_once = rows_at_once(_CELL_BYTES * len(apart) + len(self._layout.fields))

    def decode(
        self, buffer: BytesLike | NDArray[np.uint8], *, file: str, first_record: int = 0, base_offset: int = 0
    ) -> pa.RecordBatch:
        """The records of a buffer, in the schema's order of columns. It may go afterwards: nothing points into it.
        Columns that are in place are left out.

        `file`, `first_record` and `base_offset` (where the buffer lies in the file) only serve messages. Raises
        CorruptionError naming file, record and offset, DataError naming record and field for another schema's records.
        """
        data = np.frombuffer(buffer, dtype=np.uint8)
        place: dict[str, Any] = {"file": file, "first_record": first_record, "base_offset": base_offset}
        offsets = record_offsets(data, **place, check_data=False)
        found = in_runs(offsets, self._rows_at_once, lambda some: self._fast(data, some))
        if found is not None:
            return found
        return decode_batch(self._schema, parse_records(data.data, **place)).select(self._arrow.names)

    def decode_frames(self, buffers: Sequence[NDArray[np.uint8]]) -> Frames | None:
        """The records of several buffers, one after another, at the cost of one call.

        None where the plain readers have to look at one of them: `decode` each then, to hear what is wrong. Tensors
        that are in place lie in the buffers, which must stay as long as they are used.
        """
        from storage.kernels import frames

        parts = []
        for data in buffers:
            offsets = np.empty(len(data) // FRAMING_BYTES + 1, dtype=np.int64)
            count = frames.scan(data.ctypes.data, len(data), offsets, False)
            if count < 0:
                return None
            parts.append((data, offsets[: count + 1]))
        if sum(len(offsets) - 1 for _, offsets in parts) > self._rows_at_once:
            return None
        return self._read(parts)

    def _fast(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> pa.RecordBatch | None:
        """The records between the offsets; None where the plain readers have to look at them."""
        found = self._read([(data, offsets)])
        return None if found is None else found.batch

    def _read(self, parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]]) -> Frames | None:
        from features.codec import decode_kernel as kernel

        layout, rows = self._layout, sum(len(offsets) - 1 for _, offsets in parts)
        size_bytes = sum(len(data) for data, _ in parts)
        outs = np.zeros((len(layout.fields), kernel.OUT_COLUMNS), dtype=np.int64)
        values: dict[int, NDArray[Any]] = {}
        valid: dict[int, NDArray[np.uint8]] = {}
        for number, (field, kind) in enumerate(zip(layout.fields, layout.kinds.tolist(), strict=True)):
            if field.nullable:
                valid[number] = np.empty(rows, dtype=np.uint8)
                outs[number, kernel.VALID] = valid[number].ctypes.data
            outs[number, kernel.VARIABLE] = self._variable.get(number, -1)
            if field.name in self._wanted and number not in self._variable:
                size = {INT: 8, BOOL: 1}.get(kind, int(layout.widths[number]))
                if kind == TENSOR and rows * size > size_bytes:
                    return None  # shorter than declared, and what is declared may be more than there is memory
                values[number] = np.empty(rows * size, dtype=np.uint8)
                outs[number, kernel.VALUES] = values[number].ctypes.data
        starts, sizes = np.zeros((2, max(len(self._variable), 1), rows), dtype=np.int64)
        done = 0
        for data, offsets in parts:
            if not kernel.decode(*layout.arguments, data.ctypes.data, offsets, outs, starts, sizes, done):
                return None
            done += len(offsets) - 1
        columns, places, raw = [], {}, {}
        for name in self._names:
            number = self._wanted[name]
            field, bits = layout.fields[number], valid.get(number)
            if name in self._in_place and number not in self._variable:
                raw[name] = values[number]
                continue
            if name in self._in_place:
                row = self._variable[number]
                if not bool((sizes[row] == layout.widths[number]).all()):
                    return None
                places[name] = starts[row]
                continue
            if number in self._variable:
                row = self._variable[number]
                column = self._variable_column(field, number, starts[row], sizes[row], bits)
            else:
                column = self._fixed_column(field, number, values[number], rows, bits)
            if column is None:
                return None
            columns.append(column)
        batch = pa.RecordBatch.from_arrays(columns, schema=self._arrow)
        counts = tuple(len(offsets) - 1 for _, offsets in parts)
        return Frames(batch, places, raw, counts, tuple(data for data, _ in parts))

    def _fixed_column(
        self, field: Field, number: int, values: NDArray[np.uint8], rows: int, valid: NDArray[np.uint8] | None
    ) -> pa.Array:
        kind = self._layout.kinds[number]
        if kind == TENSOR:
            width = int(self._layout.widths[number])
            if rows * width > _MAX_OFFSET:
                return None
            ends = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
            return array_of(field.arrow_type, rows, None, ends, values)
        column = array_of(field.record_type, rows, valid, bits_of(values) if kind == BOOL else values)
        return of_type(column, field.arrow_type)

    def _variable_column(
        self,
        field: Field,
        number: int,
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        valid: NDArray[np.uint8] | None,
    ) -> pa.Array | None:
        """A column of bytes or lists; None where the plain decoder has to look at it."""
        from features.codec import decode_lists as kernel

        kind, rows = int(self._layout.kinds[number]), len(starts)
        ends = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(sizes, out=ends[1:])
        total = int(ends[-1])
        if total > _MAX_OFFSET:
            return None
        offsets = ends.astype(np.int32)
        if kind in (BYTES, TENSOR):
            width = self._layout.widths[number]
            if kind == TENSOR and not (sizes == (width if valid is None else width * valid)).all():
                return None
            data = np.empty(total, dtype=np.uint8)
            kernel.gather(starts, sizes, offsets, data.ctypes.data)
            return checked_text(array_of(field.arrow_type, rows, valid, offsets, data))
        width, item = int(self._layout.widths[number]), field.record_type.value_type
        if kind in (INT_LIST, BOOL_LIST, FIXED_LIST):
            data = np.empty(total * {INT_LIST: 8, BOOL_LIST: 1}.get(kind, width), dtype=np.uint8)
            if not kernel.list_values(kind, width, starts, sizes, data.ctypes.data):
                return None
            items = array_of(item, total, None, bits_of(data) if kind == BOOL_LIST else data)
        else:
            item_offsets = np.zeros(total + 1, dtype=np.int32)
            size = kernel.item_ends(starts, sizes, item_offsets)
            if size < 0:
                return None
            data = np.empty(size, dtype=np.uint8)
            kernel.list_values(kind, width, starts, sizes, data.ctypes.data)
            items = checked_text(array_of(item, total, None, item_offsets, data))
            if items is None:
                return None
        lists = [None, pa.py_buffer(offsets)]
        children = [of_type(items, field.arrow_type.value_type)]
        return pa.Array.from_buffers(field.arrow_type, rows, lists, null_count=0, children=children)
