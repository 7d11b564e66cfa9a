"""Columns to framed tf.Examples: one loop a field over a block of rows that stays in the processor's cache.

Heads, names and numbers are stored in whole words, which may spill over up to nine bytes behind an entry. Behind the
last entry of a record lie 16 bytes that are written after all entries: its checksum and the next record's header.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from features.codec import columns, layout
from features.codec.columns import DATA, DATA_BIT, ENDS, ENDS_WIDTH, LISTS, LISTS_WIDTH, VALID, VALID_BIT
from features.codec.layout import BOOL, BOOL_LIST, BYTES, FIXED, FIXED_LIST, INT, INT_LIST, TENSOR
from storage.kernels import crc32c, memory
from storage.kernels.crc32c import masked_crc32c, masked_crc32c_of_word
from storage.kernels.jit import kernels
from storage.kernels.memory import (
    copy,
    leading_zeros,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
)

_kernel = kernels(__name__, columns, layout, crc32c, memory)

HEADER_BYTES = 12
FRAMING_BYTES = 16
SPILL_BYTES = 16  # what a buffer needs behind its last record
# A block is written field by field and read once more for its checksums: half of a first-level cache.
_BLOCK_BYTES = 16 << 10
_BLOCK_ROWS = 128


@njit
def _valid(place: Any, row: Any) -> Any:
    if place[VALID] == 0:
        return True
    bit = place[VALID_BIT] + row
    return (load_u8(place[VALID] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1) != 0


@njit
def _bit(place: Any, number: Any) -> Any:
    bit = place[DATA_BIT] + number
    return (load_u8(place[DATA] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1)


@njit
def _offset(address: Any, width: Any, number: Any) -> Any:
    if width == 4:
        return np.int64(load_i32(address + 4 * number))
    return load_i64(address + 8 * number)


@njit
def varint_size(value: Any) -> Any:
    """The bytes of a uint64 as varint: a ninth bit for each eight, rounded up."""
    return np.int64((np.uint64(640) - leading_zeros(value | np.uint64(1)) * np.uint64(9)) >> np.uint64(6))


@njit
def _length_size(length: Any) -> Any:
    return varint_size(np.uint64(length))


@njit
def _store_length(at: Any, length: Any) -> Any:
    while length > 127:
        store_u8(at, np.uint8(length & 127 | 128))
        length >>= 7
        at += 1
    store_u8(at, np.uint8(length))
    return at + 1


@njit
def _store_varint(at: Any, value: Any, size: Any) -> None:
    """Spread the number over its bytes, seven bits each, all at once; stores up to 10 bytes."""
    low = value & np.uint64(0xFFFFFFFFFFFFFF)
    low = (low & np.uint64(0x0FFFFFFF)) | (low & np.uint64(0xFFFFFFF0000000)) << np.uint64(4)
    low = (low & np.uint64(0x00003FFF00003FFF)) | (low & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
    low = (low & np.uint64(0x007F007F007F007F)) | (low & np.uint64(0x3F803F803F803F80)) << np.uint64(1)
    if size <= 8:
        more = (np.uint64(1) << np.uint64(8 * (size - 1))) - np.uint64(1)
        store_u64(at, low | (more & np.uint64(0x8080808080808080)))
        return
    store_u64(at, low | np.uint64(0x8080808080808080))
    high = value >> np.uint64(56) & np.uint64(127)
    if size == 10:
        high |= np.uint64(0x180)
    store_u16(at + 8, np.uint16(high))


@njit
def _copy_words(target: Any, source: Any, size: Any) -> None:
    for word in range(0, size, 8):
        store_u64(target + word, load_u64(source + word))


@njit
def _list_size(kind: Any, place: Any, width: Any, first: Any, last: Any) -> Any:
    """The bytes of a list message's values: numbers packed, without their own head; bytes with theirs."""
    size = 0
    if kind == INT_LIST:
        for item in range(first, last):
            size += varint_size(load_u64(place[DATA] + 8 * item))
    elif kind == BOOL_LIST:
        size = last - first
    elif kind == FIXED_LIST:
        size = (last - first) * (4 if width == 4 else 10)
    else:
        for item in range(first, last):
            length = _offset(place[ENDS], place[ENDS_WIDTH], item + 1) - _offset(place[ENDS], place[ENDS_WIDTH], item)
            size += 1 + _length_size(length) + length
    return size


@njit
def _is_packed(kind: Any, width: Any) -> Any:
    return kind in (INT_LIST, BOOL_LIST) or (kind == FIXED_LIST and width == 4)


@njit
def _wrapped(size: Any) -> Any:
    """A message of `size` bytes with its tag and length."""
    return 1 + _length_size(size) + size


@_kernel
def sizes(kinds: Any, widths: Any, head_sizes: Any, name_sizes: Any, places: Any, out: Any) -> None:
    """Add to `out`, (n,) int64, the bytes of each row's entries."""
    rows = len(out)
    for f in range(len(kinds)):
        kind, width, place, heads = kinds[f], widths[f], places[f], head_sizes[f]
        if kind == INT:
            for row in range(rows):
                if _valid(place, row):
                    size = varint_size(load_u64(place[DATA] + 8 * row))
                    out[row] += heads[size] + size
        elif kind in (BOOL, FIXED, TENSOR):
            size = heads[1] + 1 if kind == BOOL else heads[0] + width
            for row in range(rows):
                if _valid(place, row):
                    out[row] += size
        elif kind == BYTES:
            for row in range(rows):
                if _valid(place, row):
                    ends, wide = place[ENDS], place[ENDS_WIDTH]
                    length = _offset(ends, wide, row + 1) - _offset(ends, wide, row)
                    out[row] += _wrapped(name_sizes[f] + _wrapped(_wrapped(_wrapped(length))) - 1)
        else:
            for row in range(rows):
                first = _offset(place[LISTS], place[LISTS_WIDTH], row)
                last = _offset(place[LISTS], place[LISTS_WIDTH], row + 1)
                if first == last:
                    out[row] += heads[0]
                    continue
                size = _list_size(kind, place, width, first, last)
                body = _wrapped(size) if _is_packed(kind, width) else size
                out[row] += _wrapped(name_sizes[f] + _wrapped(_wrapped(body)) - 1)


@njit
def _write_ints(place: Any, heads: Any, stride: Any, head_sizes: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if not _valid(place, first + row):
            continue
        value = load_u64(place[DATA] + 8 * (first + row))
        size = varint_size(value)
        at, head = ends[row], head_sizes[size]
        _copy_words(at, heads + stride * size, head)
        _store_varint(at + head, value, size)
        ends[row] = at + head + size


@njit
def _write_bools(place: Any, head_at: Any, head: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if _valid(place, first + row):
            at = ends[row]
            _copy_words(at, head_at, head)
            store_u8(at + head, _bit(place, first + row))
            ends[row] = at + head + 1


@njit
def _write_fixed(place: Any, head_at: Any, head: Any, width: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if _valid(place, first + row):
            at, source = ends[row], place[DATA] + width * (first + row)
            _copy_words(at, head_at, head)
            if width == 4:
                store_u32(at + head, load_u32(source))
            else:
                store_u64(at + head, load_u64(source))
            ends[row] = at + head + width


@njit
def _write_tensors(place: Any, head_at: Any, head: Any, width: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if _valid(place, first + row):
            at = ends[row]
            _copy_words(at, head_at, head)
            copy(at + head, place[DATA] + _offset(place[ENDS], place[ENDS_WIDTH], first + row), width)
            ends[row] = at + head + width


@njit
def _write_name(at: Any, name: Any, name_size: Any, tag: Any, body: Any) -> Any:
    """An entry up to the body of its list message, which has `body` bytes."""
    feature = _wrapped(body)
    store_u8(at, np.uint8(0x0A))
    at = _store_length(at + 1, name_size + _length_size(feature) + feature)
    _copy_words(at, name, name_size)
    at = _store_length(at + name_size, feature)
    store_u8(at, np.uint8(tag))
    return _store_length(at + 1, body)


@njit
def _write_item(at: Any, place: Any, item: Any) -> Any:
    start = _offset(place[ENDS], place[ENDS_WIDTH], item)
    length = _offset(place[ENDS], place[ENDS_WIDTH], item + 1) - start
    store_u8(at, np.uint8(0x0A))
    at = _store_length(at + 1, length)
    copy(at, place[DATA] + start, length)
    return at + length


@njit
def _write_bytes(place: Any, name: Any, name_size: Any, tag: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(first, first + rows):
        if _valid(place, row):
            width = place[ENDS_WIDTH]
            length = _offset(place[ENDS], width, row + 1) - _offset(place[ENDS], width, row)
            at = _write_name(ends[row - first], name, name_size, tag, _wrapped(length))
            ends[row - first] = _write_item(at, place, row)


@njit
def _write_list(kind: Any, place: Any, width: Any, at: Any, first: Any, last: Any) -> Any:
    for item in range(first, last):
        if kind == INT_LIST:
            value = load_u64(place[DATA] + 8 * item)
            size = varint_size(value)
            _store_varint(at, value, size)
            at += size
        elif kind == BOOL_LIST:
            store_u8(at, _bit(place, item))
            at += 1
        elif kind == FIXED_LIST and width == 4:
            store_u32(at, load_u32(place[DATA] + 4 * item))
            at += 4
        elif kind == FIXED_LIST:
            store_u16(at, np.uint16(0x080A))
            store_u64(at + 2, load_u64(place[DATA] + 8 * item))
            at += 10
        else:
            at = _write_item(at, place, item)
    return at


@njit
def _write_lists(
    kind: Any,
    place: Any,
    empty: Any,
    empty_size: Any,
    name: Any,
    name_size: Any,
    tag: Any,
    width: Any,
    first: Any,
    ends: Any,
    rows: Any,
) -> None:
    for row in range(rows):
        start = _offset(place[LISTS], place[LISTS_WIDTH], first + row)
        stop = _offset(place[LISTS], place[LISTS_WIDTH], first + row + 1)
        at = ends[row]
        if start == stop:
            _copy_words(at, empty, empty_size)
            ends[row] = at + empty_size
            continue
        size = _list_size(kind, place, width, start, stop)
        if _is_packed(kind, width):
            at = _write_name(at, name, name_size, tag, _wrapped(size))
            store_u8(at, np.uint8(0x0A))
            at = _store_length(at + 1, size)
        else:
            at = _write_name(at, name, name_size, tag, size)
        ends[row] = _write_list(kind, place, width, at, start, stop)


@_kernel
def encode(
    kinds: Any,
    tags: Any,
    widths: Any,
    heads: Any,
    head_sizes: Any,
    names: Any,
    name_sizes: Any,
    stride: Any,
    places: Any,
    entries: Any,
    offsets: Any,
    target: Any,
) -> Any:
    """Write each row's framed record to target + offsets[row]; returns whether all lie exactly between the offsets.

    `heads`, `names` and `target` are addresses; `entries` (n,) comes from `sizes`, `offsets` (n + 1,) from `framed`.
    """
    rows, exact, start = len(entries), True, 0
    ends = np.empty(_BLOCK_ROWS, dtype=np.int64)
    while start < rows:
        stop = start + 1
        while stop < rows and stop - start < _BLOCK_ROWS and offsets[stop + 1] - offsets[start] <= _BLOCK_BYTES:
            stop += 1
        count = stop - start
        for row in range(count):
            ends[row] = target + offsets[start + row] + HEADER_BYTES + 1 + _length_size(entries[start + row])
        for f in range(len(kinds)):
            kind, place, head, name = kinds[f], places[f], heads + 11 * stride * f, names + stride * f
            if kind == INT:
                _write_ints(place, head, stride, head_sizes[f], start, ends, count)
            elif kind == BOOL:
                _write_bools(place, head + stride, head_sizes[f, 1], start, ends, count)
            elif kind == FIXED:
                _write_fixed(place, head, head_sizes[f, 0], widths[f], start, ends, count)
            elif kind == TENSOR:
                _write_tensors(place, head, head_sizes[f, 0], widths[f], start, ends, count)
            elif kind == BYTES:
                _write_bytes(place, name, name_sizes[f], tags[f], start, ends, count)
            else:
                _write_lists(
                    kind,
                    place,
                    head,
                    head_sizes[f, 0],
                    name,
                    name_sizes[f],
                    tags[f],
                    widths[f],
                    start,
                    ends,
                    count,
                )
        for row in range(start, stop):
            at = target + offsets[row]
            length = offsets[row + 1] - offsets[row] - FRAMING_BYTES
            store_u64(at, np.uint64(length))
            store_u32(at + 8, masked_crc32c_of_word(np.uint64(length)))
            at += HEADER_BYTES
            store_u8(at, np.uint8(0x0A))
            _store_length(at + 1, entries[row])
            exact = exact and ends[row - start] == at + length
            store_u32(at + length, masked_crc32c(at, length))
        start = stop
    return exact


@_kernel
def framed(entries: Any, offsets: Any) -> None:
    """Turn the bytes of each row's entries, (n,), into where its record begins and the last one ends, (n + 1,)."""
    at = 0
    for row in range(len(entries)):
        offsets[row] = at
        at += FRAMING_BYTES + _wrapped(entries[row])
    offsets[len(entries)] = at
