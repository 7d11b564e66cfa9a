"""Framed tf.Examples from columns and back, by compiled kernels: RecordEncoder and RecordDecoder.

Decision record: docs/decisions/060-codec-kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.arrow import array_of, bits_of, checked_text, in_runs, of_type, rows_at_once
from lockstep.features.examples import decode_batch
from lockstep.features.examples.example import BytesLike
from lockstep.features.examples.layout import (
    BOOL,
    BOOL_LIST,
    BYTES,
    FIXED_LIST,
    INT,
    INT_LIST,
    TENSOR,
    Layout,
    describe,
)
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.formats.tfrecord import parse_records, record_offsets

_MAX_OFFSET = (1 << 31) - 1
_CELL_BYTES = 16  # the address and the size of a value of variable size
_LINE_BYTES = 64  # of a cache line


@dataclass(frozen=True, slots=True)
class Frames:
    """Decoded records of several buffers: columns as a `batch`, and fields in place by address.

    `places` has the address of each row's value in `buffers`, for tensors. `values` has the address of an array of all
    rows' values in `memory`, for int64 and floats.
    """

    batch: pa.RecordBatch
    places: dict[str, NDArray[np.int64]]
    values: dict[str, int]
    memory: NDArray[np.uint8]
    buffers: Sequence[NDArray[np.uint8]]


class RecordDecoder:
    """Decodes what RecordEncoder wrote, checking both checksums and the form of each record.

    The first call compiles the kernels or loads them from the cache; they release the GIL. Bytes that differ from the
    encoder's form go to lockstep.features.examples.decode_batch, which decodes them or reports the error. `columns`
    names the columns to return (None: all); the others are checked only. For fields in `in_place`, which must not be
    nullable, `decode_frames` returns addresses in place of columns: see Frames.
    """

    def __init__(self, schema: Columns, columns: Sequence[str] | None = None, in_place: Collection[str] = ()) -> None:
        self._schema, self._layout = schema, Layout.of(schema)
        unfit = [name for name in in_place if schema[name].nullable or schema[name].is_list]
        if unfit:
            raise ConfigError(
                "nullable fields and lists cannot be decoded in place",
                got=", ".join(unfit),
                allowed="scalars and tensors that are never null",
                next_step="Leave them out of `in_place`.",
            )
        self._in_place = frozenset(in_place)
        wanted = set(schema.arrow_schema().names if columns is None else columns)
        self._wanted = {field.name: number for number, field in enumerate(self._layout.fields) if field.name in wanted}
        self._names = [name for name in schema.arrow_schema().names if name in self._wanted]
        kept = [field for field in schema.arrow_schema() if field.name in self._wanted]
        self._arrow = pa.schema([field for field in kept if field.name not in self._in_place])
        kinds, widths = self._layout.kinds.tolist(), self._layout.widths.tolist()
        # A tensor that is never null has memory of a fixed size; a nullable one takes none where it is null.
        apart = [
            number
            for number, (field, kind) in enumerate(zip(self._layout.fields, kinds, strict=True))
            if kind >= INT_LIST
            or kind == BYTES
            or (kind == TENSOR and (field.nullable or field.name in self._in_place))
        ]
        self._variable = {number: row for row, number in enumerate(apart)}
        self._rows_at_once = rows_at_once(_CELL_BYTES * len(apart) + len(self._layout.fields))
        self._rows_apart = np.array([self._variable.get(number, -1) for number in range(len(kinds))], dtype=np.int64)
        # The wanted fields of fixed size, and the bytes of one value of each.
        self._fixed = [number for number in self._wanted.values() if number not in self._variable]
        self._sizes = [{INT: 8, BOOL: 1}.get(kinds[number], widths[number]) for number in self._fixed]
        self._value_bytes = np.array(self._sizes, dtype=np.int64)
        self._tensor_bytes = max((widths[number] for number in self._fixed if kinds[number] == TENSOR), default=0)
        self._nullable = [number for number, field in enumerate(self._layout.fields) if field.nullable]
        # Fields of fixed size that are returned by address, and those returned as columns.
        self._place_of = {number: place for place, number in enumerate(self._fixed)}
        raw = [name for name in self._names if name in self._in_place and self._wanted[name] in self._place_of]
        self._raw = {name: self._wanted[name] for name in raw}
        self._made = [name for name in self._names if name not in self._raw]

    def decode(
        self, buffer: BytesLike | NDArray[np.uint8], *, file: str, first_record: int = 0, base_offset: int = 0
    ) -> pa.RecordBatch:
        """The records of a buffer as columns in the schema's order, without those in place. The buffer is not kept.

        `file`, `first_record` and `base_offset` (the buffer's offset in the file) are only used in errors. Raises
        CorruptionError naming file, record and offset; DataError naming record and field for another schema's records.
        """
        data = np.frombuffer(buffer, dtype=np.uint8)
        place: dict[str, Any] = {"file": file, "first_record": first_record, "base_offset": base_offset}
        offsets = record_offsets(data, **place, check_data=False)
        found = in_runs(offsets, self._rows_at_once, lambda some: self._fast(data, some))
        if found is not None:
            return found
        return decode_batch(self._schema, parse_records(data.data, **place)).select(self._arrow.names)

    def decode_frames(self, buffers: Sequence[NDArray[np.uint8]], counts: Sequence[int]) -> Frames | None:
        """The records of several buffers in one call; `counts` has the number of records in each.

        None if the kernel refuses a buffer: then call `decode` for each, which decodes it or raises the error. Tensors
        in place point into the buffers, so Frames keeps these.
        """
        from lockstep.features.examples import decode_kernels as kernel

        rows, sizes = sum(counts), [len(data) for data in buffers]
        if rows > self._rows_at_once:
            return None
        parts = np.array([[data.ctypes.data for data in buffers], sizes, counts], dtype=np.int64)

        def decode(*outs: NDArray[np.int64]) -> bool:
            return bool(kernel.decode_parts(*self._layout.arguments, parts, *outs))

        return self._read(rows, sum(sizes), decode, buffers)

    def _fast(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> pa.RecordBatch | None:
        """The records between the offsets; None if the kernel refuses them."""
        from lockstep.features.examples import decode_kernels as kernel

        def decode(*outs: NDArray[np.int64]) -> bool:
            return bool(kernel.decode(*self._layout.arguments, data.ctypes.data, offsets, *outs, 0))

        found = self._read(len(offsets) - 1, len(data), decode, [data])
        return None if found is None else found.batch

    def _read(
        self, rows: int, size_bytes: int, decode: Callable[..., bool], buffers: Sequence[NDArray[np.uint8]]
    ) -> Frames | None:
        """Read `rows` records of `size_bytes` in all; `decode` calls the kernel with its outs, starts and sizes."""
        from lockstep.features.examples import decode_kernels as kernel

        if rows * self._tensor_bytes > size_bytes:
            return None  # too few bytes for the declared tensors, which may need more memory than there is
        layout = self._layout
        outs = np.zeros((len(layout.fields), kernel.OUT_COLUMNS), dtype=np.int64)
        outs[:, kernel.VARIABLE] = self._rows_apart
        # The values of all fields share one allocation, each field's aligned to _LINE_BYTES.
        stops = np.cumsum(-(-rows * self._value_bytes // _LINE_BYTES) * _LINE_BYTES)
        memory = np.empty(int(stops[-1]) if len(stops) else 0, dtype=np.uint8)
        begins = np.concatenate([[0], stops[:-1]])[: len(stops)]
        outs[self._fixed, kernel.VALUES] = memory.ctypes.data + begins
        valid = {number: np.empty(rows, dtype=np.uint8) for number in self._nullable}
        for number, flags in valid.items():
            outs[number, kernel.VALID] = flags.ctypes.data
        starts, sizes = np.zeros((2, max(len(self._variable), 1), rows if self._variable else 0), dtype=np.int64)
        if not decode(outs, starts, sizes):
            return None
        columns, places = [], {}
        for name in self._made:
            number = self._wanted[name]
            field, bits = layout.fields[number], valid.get(number)
            row = self._variable.get(number)
            if row is not None and name in self._in_place:
                if not bool((sizes[row] == layout.widths[number]).all()):
                    return None
                places[name] = starts[row]
                continue
            if row is None:
                place = self._place_of[number]
                begin = int(begins[place])
                values = memory[begin : begin + rows * self._sizes[place]]
                column = self._fixed_column(field, number, values, rows, bits)
            else:
                column = self._variable_column(field, number, starts[row], sizes[row], bits)
            if column is None:
                return None
            columns.append(column)
        batch = pa.RecordBatch.from_arrays(columns, schema=self._arrow)
        addresses = outs[:, kernel.VALUES].tolist()
        raw = {name: addresses[number] for name, number in self._raw.items()}
        return Frames(batch, places, raw, memory, buffers)

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
        """A column of bytes or lists; None if the plain decoder must report what is wrong with it."""
        from lockstep.features.examples import decode_kernels as kernel

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


class RecordEncoder:
    """Encodes and frames rows with both checksums: the same bytes as lockstep.features.examples.example and
    lockstep.storage.formats.tfrecord.

    The first call compiles the kernels or loads them from the cache; they release the GIL. An encoder is not
    thread-safe. Memory: the encoded bytes of the largest batch, and 16 bytes for each row.
    """

    def __init__(self, schema: Columns) -> None:
        self._layout = Layout.of(schema)
        self._buffer = np.empty(0, dtype=np.uint8)

    def sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The framed size of each row in bytes, (n,) int64, without encoding. Raises DataError as `encode` does."""
        places, owners = describe(self._layout, batch)
        offsets = self._offsets(places, batch.num_rows)[1]
        del owners  # the kernel read them by address
        return np.diff(offsets)

    def encode(self, batch: pa.RecordBatch) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The framed records of a batch end to end, uint8, and where each begins and the last ends, (n + 1,) int64.

        The bytes are a view into a buffer that the next call overwrites. Columns are found by name. Raises DataError
        for a null that the schema does not allow or inside a list, a tensor of the wrong length and a column of another
        type.
        """
        from lockstep.features.examples import encode_kernels as kernel

        layout = self._layout
        places, owners = describe(layout, batch)
        entries, offsets = self._offsets(places, batch.num_rows)
        total = int(offsets[-1])
        if len(self._buffer) < total + kernel.SPILL_BYTES:
            self._buffer = np.empty(total + total // 8 + kernel.SPILL_BYTES, dtype=np.uint8)
        exact = kernel.encode(*layout.arguments, places, entries, offsets, self._buffer.ctypes.data)
        del owners
        if not exact:
            raise DataError(
                "the encoded records of a batch differ from the sizes computed for them",
                got=f"{batch.num_rows} records",
                allowed=f"{total} bytes in all",
                next_step="Check that no other thread changes the rows while they are written, and run the job again.",
            )
        return self._buffer[:total], offsets

    def _offsets(self, places: NDArray[np.int64], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        from lockstep.features.examples import encode_kernels as kernel

        layout = self._layout
        entries, offsets = np.zeros(rows, dtype=np.int64), np.empty(rows + 1, dtype=np.int64)
        kernel.sizes(layout.kinds, layout.widths, layout.head_sizes, layout.name_sizes, places, entries)
        kernel.framed(entries, offsets)
        return entries, offsets
