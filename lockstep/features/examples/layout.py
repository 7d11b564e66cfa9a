"""A schema as arrays for the kernels: which loop each field takes, and the bytes that all its entries share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.examples.column_checks import as_recorded, check_nulls, check_tensor_lengths
from lockstep.features.examples.example import VARINT_MAX_BYTES, list_tag, map_key, varint
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns

# The kinds of fields. lockstep/features/examples/example.py describes their bytes in a tf.Example.
INT, BOOL, FIXED, BYTES, TENSOR, INT_LIST, BOOL_LIST, FIXED_LIST, BYTES_LIST = range(9)
_WORD = 8  # kernels copy and compare heads in words of 8 bytes, so each head is padded
_KINDS = {"int64": (INT, INT_LIST), "bool": (BOOL, BOOL_LIST), "float32": (FIXED, FIXED_LIST)}
_KINDS |= {"float64": (FIXED, FIXED_LIST), "uint64": (FIXED, FIXED_LIST)}

# The columns of a description: the address of the validity bits (0 if no value is null) and the number of bits before
# the first row; the address of the values, for BOOL with the number of bits before the first; the addresses of the
# offsets of lists and of byte values, and their widths, 4 or 8 bytes.
VALID, VALID_BIT, DATA, DATA_BIT, LISTS, LISTS_WIDTH, ENDS, ENDS_WIDTH = range(8)
DESCRIPTION_COLUMNS = 8


@dataclass(frozen=True)
class Layout:
    """The k fields of a schema in byte order of their names.

    kinds, tags, widths: (k,) int64. `widths` is the size of a FIXED value or of a tensor in bytes, else 0.
    heads: (k, 11, stride) uint8. heads[f, s] are the bytes of an entry before its value: for INT before one of s bytes
    (1 to 10), for BOOL s = 1, for FIXED and TENSOR s = 0. For a list, s = 0 is the whole entry of an empty list.
    head_sizes: (k, 11) int64, the sizes of heads in bytes.
    names: (k, stride) uint8, the entry's name with its tag and length, then the tag of the feature.
    name_sizes: (k,) int64.
    """

    fields: tuple[Field, ...]
    kinds: NDArray[np.int64]
    tags: NDArray[np.int64]
    widths: NDArray[np.int64]
    heads: NDArray[np.uint8]
    head_sizes: NDArray[np.int64]
    names: NDArray[np.uint8]
    name_sizes: NDArray[np.int64]

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The layout as arguments of a kernel; heads and names are addresses, so keep the layout while it runs."""
        heads, names = self.heads.ctypes.data, self.names.ctypes.data
        return (self.kinds, self.tags, self.widths, heads, self.head_sizes, names, self.name_sizes, self.heads.shape[2])

    @classmethod
    def of(cls, schema: Columns) -> Layout:
        """The layout of a schema's Examples."""
        fields = schema.in_byte_order
        kinds, tags = (
            [kind_of(field) for field in fields],
            [list_tag(field) for field in fields],
        )
        widths = [_width(field, kind) for field, kind in zip(fields, kinds, strict=True)]
        heads = [_heads(*each) for each in zip(fields, kinds, tags, widths, strict=True)]
        names = [map_key(field.name) for field in fields]
        stride = max(len(part) for row in (*heads, names) for part in row) // _WORD * _WORD + 2 * _WORD
        return cls(
            fields=fields,
            kinds=np.array(kinds, dtype=np.int64),
            tags=np.array(tags, dtype=np.int64),
            widths=np.array(widths, dtype=np.int64),
            heads=np.stack([_padded(row, stride) for row in heads]),
            head_sizes=np.array([[len(head) for head in row] for row in heads], dtype=np.int64),
            names=_padded(names, stride),
            name_sizes=np.array([len(name) for name in names], dtype=np.int64),
        )


def kind_of(field: Field) -> int:
    """The kind of a field, one of the numbers above."""
    if field.is_tensor:
        return TENSOR
    return _KINDS.get(field.dtype, (BYTES, BYTES_LIST))[field.is_list]


def _width(field: Field, kind: int) -> int:
    if kind == TENSOR:
        return field.tensor_bytes
    return (4 if field.dtype == "float32" else 8) if kind in (FIXED, FIXED_LIST) else 0


def _heads(field: Field, kind: int, tag: int, width: int) -> list[bytes]:
    heads = [b""] * (VARINT_MAX_BYTES + 1)
    if kind == INT:
        heads[1:] = [_head(field, tag, size) for size in range(1, VARINT_MAX_BYTES + 1)]
    elif kind == BOOL:
        heads[1] = _head(field, tag, 1)
    elif kind in (FIXED, TENSOR):
        heads[0] = _head(field, tag, width)
    elif kind != BYTES:
        heads[0] = _entry(field, bytes([tag, 0]), 0)
    return heads


def _head(field: Field, tag: int, size: int) -> bytes:
    """The start of an entry with one value of `size` bytes, up to the value."""
    item = b"\x0a" + varint(size)
    return _entry(field, bytes([tag]) + varint(len(item) + size) + item, size)


def _entry(field: Field, feature: bytes, missing: int) -> bytes:
    """An entry with a Feature message of which the last `missing` bytes are left out."""
    name, size = map_key(field.name), len(feature) + missing
    body = name + varint(size) + feature
    return b"\x0a" + varint(len(body) + missing) + body


def _padded(rows: list[bytes], stride: int) -> NDArray[np.uint8]:
    """Return (len(rows), stride) uint8, each row padded with zeros."""
    return np.frombuffer(b"".join(row.ljust(stride, b"\0") for row in rows), dtype=np.uint8).reshape(-1, stride)


def describe(layout: Layout, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], list[pa.Array]]:
    """The addresses of a batch's values, (k, 8) int64, and the columns that own them: keep these while it is in use.

    Columns are found by name. Raises DataError for a null that the schema does not allow or inside a list, a tensor of
    the wrong length, a decimal that is not a uint64, and a column of another type unless the declared type represents
    each of its values exactly.
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
    """The address of a column's first offset, and the bytes of each."""
    large = pa.types.is_large_list(column.type) or column.type in (pa.large_string(), pa.large_binary())
    buffer, width = column.buffers()[1], 8 if large else 4
    return (0 if buffer is None else buffer.address + column.offset * width), width
