"""Kernels that encode Arrow columns as framed tf.Examples.

They find the columns by the descriptions that lockstep/features/examples/layout.py makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples import layout, varints
from lockstep.features.examples.layout import (
    BOOL,
    BOOL_LIST,
    BYTES,
    DATA,
    DATA_BIT,
    ENDS,
    ENDS_WIDTH,
    FIXED,
    FIXED_LIST,
    INT,
    INT_LIST,
    LISTS,
    LISTS_WIDTH,
    TENSOR,
    VALID,
    VALID_BIT,
)
from lockstep.features.examples.varints import length_size, store_length, store_varint, varint_size, wrapped
from lockstep.storage.kernels import crc32c, frames, memory
from lockstep.storage.kernels.crc32c import masked_crc32c, masked_crc32c_of_word
from lockstep.storage.kernels.frames import FRAMING_BYTES, HEADER_BYTES
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import (
    copy,
    load_u8,
    load_u32,
    load_u64,
    offset,
    store_u8,
    store_u16,
    store_u32,
    store_u64,
)

_kernel = kernels(__name__, layout, varints, crc32c, frames, memory)

SPILL_BYTES = 16  # kernels write whole words: a buffer needs this room after its last record
# Each field's loop writes to the block, and the checksums read it again: it takes half of an L1 cache.
_BLOCK_BYTES = 16 << 10
_BLOCK_ROWS = 128


@njit
def valid(place: Any, row: Any) -> Any:
    """Whether a row has a value."""
    if place[VALID] == 0:
        return True
    bit = place[VALID_BIT] + row
    return (load_u8(place[VALID] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1) != 0


@njit
def bool_at(place: Any, number: Any) -> Any:
    """A value, 0 or 1, of a column of bools."""
    bit = place[DATA_BIT] + number
    return (load_u8(place[DATA] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1)


@njit
def copy_words(target: Any, source: Any, size: Any) -> None:
    for word in range(0, size, 8):
        store_u64(target + word, load_u64(source + word))


@njit
def list_size(kind: Any, place: Any, width: Any, first: Any, last: Any) -> Any:
    """The bytes of a list message's values: packed numbers without their head, bytes with tag and length."""
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
            length = offset(place[ENDS], place[ENDS_WIDTH], item + 1) - offset(place[ENDS], place[ENDS_WIDTH], item)
            size += 1 + length_size(length) + length
    return size


@njit
def is_packed(kind: Any, width: Any) -> Any:
    return kind in (INT_LIST, BOOL_LIST) or (kind == FIXED_LIST and width == 4)


@njit
def _write_name(at: Any, name: Any, name_size: Any, tag: Any, body: Any) -> Any:
    """Write an entry up to the body of its list message, which takes `body` bytes; returns the address after it."""
    feature = wrapped(body)
    store_u8(at, np.uint8(0x0A))
    at = store_length(at + 1, name_size + length_size(feature) + feature)
    copy_words(at, name, name_size)
    at = store_length(at + name_size, feature)
    store_u8(at, np.uint8(tag))
    return store_length(at + 1, body)


@njit
def _write_item(at: Any, place: Any, item: Any) -> Any:
    start = offset(place[ENDS], place[ENDS_WIDTH], item)
    length = offset(place[ENDS], place[ENDS_WIDTH], item + 1) - start
    store_u8(at, np.uint8(0x0A))
    at = store_length(at + 1, length)
    copy(at, place[DATA] + start, length)
    return at + length


@njit
def write_bytes(place: Any, name: Any, name_size: Any, tag: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(first, first + rows):
        if valid(place, row):
            width = place[ENDS_WIDTH]
            length = offset(place[ENDS], width, row + 1) - offset(place[ENDS], width, row)
            at = _write_name(ends[row - first], name, name_size, tag, wrapped(length))
            ends[row - first] = _write_item(at, place, row)


@njit
def _write_list(kind: Any, place: Any, width: Any, at: Any, first: Any, last: Any) -> Any:
    for item in range(first, last):
        if kind == INT_LIST:
            value = load_u64(place[DATA] + 8 * item)
            size = varint_size(value)
            store_varint(at, value, size)
            at += size
        elif kind == BOOL_LIST:
            store_u8(at, bool_at(place, item))
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
def write_lists(
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
        start = offset(place[LISTS], place[LISTS_WIDTH], first + row)
        stop = offset(place[LISTS], place[LISTS_WIDTH], first + row + 1)
        at = ends[row]
        if start == stop:
            copy_words(at, empty, empty_size)
            ends[row] = at + empty_size
            continue
        size = list_size(kind, place, width, start, stop)
        if is_packed(kind, width):
            at = _write_name(at, name, name_size, tag, wrapped(size))
            store_u8(at, np.uint8(0x0A))
            at = store_length(at + 1, size)
        else:
            at = _write_name(at, name, name_size, tag, size)
        ends[row] = _write_list(kind, place, width, at, start, stop)


@_kernel
def sizes(kinds: Any, widths: Any, head_sizes: Any, name_sizes: Any, places: Any, out: Any) -> None:
    """Add the bytes of each row's entries to `out`, (n,) int64."""
    rows = len(out)
    for f in range(len(kinds)):
        kind, width, place, heads = kinds[f], widths[f], places[f], head_sizes[f]
        if kind == INT:
            for row in range(rows):
                if valid(place, row):
                    size = varint_size(load_u64(place[DATA] + 8 * row))
                    out[row] += heads[size] + size
        elif kind in (BOOL, FIXED, TENSOR):
            size = heads[1] + 1 if kind == BOOL else heads[0] + width
            for row in range(rows):
                if valid(place, row):
                    out[row] += size
        elif kind == BYTES:
            for row in range(rows):
                if valid(place, row):
                    ends, wide = place[ENDS], place[ENDS_WIDTH]
                    length = offset(ends, wide, row + 1) - offset(ends, wide, row)
                    out[row] += wrapped(name_sizes[f] + wrapped(wrapped(wrapped(length))) - 1)
        else:
            for row in range(rows):
                first = offset(place[LISTS], place[LISTS_WIDTH], row)
                last = offset(place[LISTS], place[LISTS_WIDTH], row + 1)
                if first == last:
                    out[row] += heads[0]
                    continue
                size = list_size(kind, place, width, first, last)
                body = wrapped(size) if is_packed(kind, width) else size
                out[row] += wrapped(name_sizes[f] + wrapped(wrapped(body)) - 1)


@njit
def _write_ints(place: Any, heads: Any, stride: Any, head_sizes: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if not valid(place, first + row):
            continue
        value = load_u64(place[DATA] + 8 * (first + row))
        size = varint_size(value)
        at, head = ends[row], head_sizes[size]
        copy_words(at, heads + stride * size, head)
        store_varint(at + head, value, size)
        ends[row] = at + head + size


@njit
def _write_bools(place: Any, head_at: Any, head: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if valid(place, first + row):
            at = ends[row]
            copy_words(at, head_at, head)
            store_u8(at + head, bool_at(place, first + row))
            ends[row] = at + head + 1


@njit
def _write_fixed(place: Any, head_at: Any, head: Any, width: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if valid(place, first + row):
            at, source = ends[row], place[DATA] + width * (first + row)
            copy_words(at, head_at, head)
            if width == 4:
                store_u32(at + head, load_u32(source))
            else:
                store_u64(at + head, load_u64(source))
            ends[row] = at + head + width


@njit
def _write_tensors(place: Any, head_at: Any, head: Any, width: Any, first: Any, ends: Any, rows: Any) -> None:
    for row in range(rows):
        if valid(place, first + row):
            at = ends[row]
            copy_words(at, head_at, head)
            copy(at + head, place[DATA] + offset(place[ENDS], place[ENDS_WIDTH], first + row), width)
            ends[row] = at + head + width


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
    """Write each row's framed record to target + offsets[row]; returns whether all have exactly the computed sizes.

    `heads`, `names` and `target` are addresses; `sizes` computes `entries` (n,), `framed` computes `offsets` (n + 1,).
    """
    rows, exact, start = len(entries), True, 0
    ends = np.empty(_BLOCK_ROWS, dtype=np.int64)
    while start < rows:
        stop = start + 1
        while stop < rows and stop - start < _BLOCK_ROWS and offsets[stop + 1] - offsets[start] <= _BLOCK_BYTES:
            stop += 1
        count = stop - start
        for row in range(count):
            ends[row] = target + offsets[start + row] + HEADER_BYTES + 1 + length_size(entries[start + row])
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
                write_bytes(place, name, name_sizes[f], tags[f], start, ends, count)
            else:
                write_lists(
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
            store_length(at + 1, entries[row])
            exact = exact and ends[row - start] == at + length
            store_u32(at + length, masked_crc32c(at, length))
        start = stop
    return exact


@_kernel
def framed(entries: Any, offsets: Any) -> None:
    """Write where each framed record begins and the last one ends to `offsets` (n + 1,), from the bytes of each row's
    entries, (n,).
    """
    at = 0
    for row in range(len(entries)):
        offsets[row] = at
        at += FRAMING_BYTES + wrapped(entries[row])
    offsets[len(entries)] = at
