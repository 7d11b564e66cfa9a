"""Framed tf.Examples to columns: one loop a field over a block of rows, as they were written.

Only the form that the encoder writes is read here: names in order, lengths in as few bytes as can be, numbers packed.
For anything else a kernel returns False, and the plain decoder says what it is. Nothing is read outside a record, whose
length was checked before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples import decode_lists, layout, varints
from lockstep.features.examples.decode_lists import read_variable
from lockstep.features.examples.layout import BOOL, BYTES, FIXED, INT, TENSOR
from lockstep.features.examples.varints import read_length, read_number
from lockstep.storage.kernels import crc32c, frames, memory
from lockstep.storage.kernels.frames import FRAMING_BYTES, data_matches, scan
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u8, load_u32, load_u64, same, store_u8, store_u32, store_u64

_kernel = kernels(__name__, decode_lists, layout, varints, crc32c, frames, memory)

HEADER_BYTES, FOOTER_BYTES = 12, 4
# Where a field's values and its bytes of validity go (0: nowhere), and which row of `starts` and `sizes` it has.
VALUES, VALID, VARIABLE = range(3)
OUT_COLUMNS = 3
# A block is read once for its checksums, which brings it into the first-level cache, and then field by field.
_BLOCK_BYTES = 16 << 10
_BLOCK_ROWS = 128


@njit(forceinline=True)
def _head_of(at: Any, end: Any, heads: Any, stride: Any, head_sizes: Any) -> Any:
    """How many bytes the number has whose head stands here, 0 for none: the last byte of a head says it."""
    size = head_sizes[1]
    if end - at > size:
        said: Any = np.int64(load_u8(at + size - 1))
        if 1 <= said <= 10 and head_sizes[said] == size and same(at, heads + stride * said, size):
            return said
    if head_sizes[10] != size:  # a long name: lengths of two bytes and more for the larger numbers
        for said in range(1, 11):
            if end - at > head_sizes[said] and same(at, heads + stride * said, head_sizes[said]):
                return said
    return 0


@njit(forceinline=True)
def _read_ints(
    heads: Any, stride: Any, head_sizes: Any, values: Any, valid: Any, first: Any, at: Any, ends: Any, rows: Any
) -> Any:
    for row in range(rows):
        size = _head_of(at[row], ends[row], heads, stride, head_sizes)
        if valid != 0:
            store_u8(valid + first + row, np.uint8(size != 0))
        elif size == 0:
            return False
        if size == 0:
            if values != 0:
                store_u64(values + 8 * (first + row), np.uint64(0))
            continue
        start = at[row] + head_sizes[size]
        if ends[row] - start < size:
            return False
        value, good = read_number(start, size, ends[row])
        if not good:
            return False
        if values != 0:
            store_u64(values + 8 * (first + row), value)
        at[row] = start + size
    return True


@njit(forceinline=True)
def _read_fixed(
    kind: Any, head: Any, size: Any, width: Any, values: Any, valid: Any, first: Any, at: Any, ends: Any, rows: Any
) -> Any:
    """Values whose head is always the same: bools, floats, tensors."""
    for row in range(rows):
        start = at[row] + size
        here = ends[row] - start >= width and same(at[row], head, size)
        if valid != 0:
            store_u8(valid + first + row, np.uint8(here))
        elif not here:
            return False
        target = values + width * (first + row)
        if not here:
            if values != 0:
                for place in range(width):
                    store_u8(target + place, np.uint8(0))
            continue
        if kind == BOOL and load_u8(start) > 1:
            return False
        if values != 0:
            if kind == BOOL:
                store_u8(target, load_u8(start))
            elif kind == TENSOR:
                copy(target, start, width)
            elif width == 4:
                store_u32(target, load_u32(start))
            else:
                store_u64(target, load_u64(start))
        at[row] = start + width
    return True


@_kernel
def decode(
    kinds: Any,
    tags: Any,
    widths: Any,
    heads: Any,
    head_sizes: Any,
    names: Any,
    name_sizes: Any,
    stride: Any,
    source: Any,
    offsets: Any,
    outs: Any,
    starts: Any,
    sizes: Any,
    done: Any,
) -> Any:
    """Read the records at source + offsets[row], (n + 1,) int64, and check their data's checksums.

    Returns whether these match and all records are of the form that the encoder writes.

    Numbers and tensors go to their places in `outs`, (k, 3) int64. For fields of variable size, `starts` and `sizes`,
    (v, n) int64, get the address of each row's bytes or list values, and how many they are. `done` rows are there
    already, of other buffers.
    """
    records, first, rows = len(offsets) - 1, 0, 0
    at, ends = np.empty(_BLOCK_ROWS, dtype=np.int64), np.empty(_BLOCK_ROWS, dtype=np.int64)
    while first + rows < records:
        first, rows = first + rows, 1
        while (
            rows < _BLOCK_ROWS and first + rows < records and offsets[first + rows + 1] - offsets[first] <= _BLOCK_BYTES
        ):
            rows += 1
        for row in range(rows):
            start, end = source + offsets[first + row], source + offsets[first + row + 1]
            if not data_matches(start, end - start):
                return False
            start, end = start + HEADER_BYTES, end - FOOTER_BYTES
            if start >= end or load_u8(start) != 0x0A:
                return False
            size, start = read_length(start + 1, end)
            if start + size != end:
                return False
            at[row], ends[row] = start, end
        place = done + first
        for f in range(len(kinds)):
            kind, head, values, valid = kinds[f], heads + 11 * stride * f, outs[f, VALUES], outs[f, VALID]
            good = True
            if kind == INT:
                good = _read_ints(head, stride, head_sizes[f], values, valid, place, at, ends, rows)
            elif kind in (BOOL, FIXED) or (kind == TENSOR and outs[f, VARIABLE] < 0):
                width, which = widths[f], 0
                if kind == BOOL:
                    width, which = 1, 1
                size = head_sizes[f, which]
                good = _read_fixed(kind, head + stride * which, size, width, values, valid, place, at, ends, rows)
            else:
                row = outs[f, VARIABLE]
                form = BYTES if kind == TENSOR else kind
                good = read_variable(
                    form,
                    names + stride * f,
                    name_sizes[f],
                    tags[f],
                    widths[f],
                    valid,
                    starts[row],
                    sizes[row],
                    place,
                    at,
                    ends,
                    rows,
                )
            if not good:
                return False
        for row in range(rows):
            if at[row] != ends[row]:
                return False
    return True


@_kernel
def decode_parts(
    kinds: Any,
    tags: Any,
    widths: Any,
    heads: Any,
    head_sizes: Any,
    names: Any,
    name_sizes: Any,
    stride: Any,
    parts: Any,
    outs: Any,
    starts: Any,
    sizes: Any,
) -> Any:
    """`decode` the records of several buffers, one after another; parts (3, p) int64 has the address of each, its bytes
    and its records. Returns False too where a buffer is not just that many whole records.
    """
    done, most = 0, 0
    for part in range(parts.shape[1]):
        most = max(most, parts[1, part])
    offsets = np.empty(most // FRAMING_BYTES + 1, dtype=np.int64)
    for part in range(parts.shape[1]):
        source, records = parts[0, part], parts[2, part]
        if scan(source, parts[1, part], offsets, False) != records:
            return False
        some = offsets[: records + 1]
        if not decode(
            kinds, tags, widths, heads, head_sizes, names, name_sizes, stride, source, some, outs, starts, sizes, done
        ):
            return False
        done += records
    return True
