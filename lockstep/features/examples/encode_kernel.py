"""Columns to framed tf.Examples: one loop a field over a block of rows that stays in the processor's cache.

Heads, names and numbers are stored in whole words, which may spill over up to nine bytes behind an entry. Behind the
last entry of a record lie 16 bytes that are written after all entries: its checksum and the next record's header.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples import columns, encode_kernels, encode_lists, layout, varints
from lockstep.features.examples.columns import DATA, ENDS, ENDS_WIDTH, LISTS, LISTS_WIDTH
from lockstep.features.examples.encode_kernels import bool_at, offset, valid
from lockstep.features.examples.encode_lists import copy_words, is_packed, list_size, write_bytes, write_lists
from lockstep.features.examples.layout import BOOL, BYTES, FIXED, INT, TENSOR
from lockstep.features.examples.varints import length_size, store_length, store_varint, varint_size, wrapped
from lockstep.storage.kernels import crc32c, memory
from lockstep.storage.kernels.crc32c import masked_crc32c, masked_crc32c_of_word
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u32, load_u64, store_u8, store_u32, store_u64

_kernel = kernels(__name__, encode_kernels, columns, encode_lists, layout, varints, crc32c, memory)

HEADER_BYTES = 12
FRAMING_BYTES = 16
SPILL_BYTES = 16  # what a buffer needs behind its last record
# A block is written field by field and read once more for its checksums: half of a first-level cache.
_BLOCK_BYTES = 16 << 10
_BLOCK_ROWS = 128


@_kernel
def sizes(kinds: Any, widths: Any, head_sizes: Any, name_sizes: Any, places: Any, out: Any) -> None:
    """Add to `out`, (n,) int64, the bytes of each row's entries."""
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
    """Turn the bytes of each row's entries, (n,), into where its record begins and the last one ends, (n + 1,)."""
    at = 0
    for row in range(len(entries)):
        offsets[row] = at
        at += FRAMING_BYTES + wrapped(entries[row])
    offsets[len(entries)] = at
