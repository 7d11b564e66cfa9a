"""Kernels that decode framed tf.Examples to columns: one loop for each field over a block of rows.

They read only the form that the encoder writes: names in order, lengths in the fewest bytes, numbers packed. For any
other form a kernel returns False, and the plain decoder decodes it or reports the error. No kernel reads outside a
record, whose length is checked first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples import layout, varints
from lockstep.features.examples.layout import BOOL, BOOL_LIST, BYTES, FIXED, FIXED_LIST, INT, INT_LIST, TENSOR
from lockstep.features.examples.varints import read_length, read_number
from lockstep.storage.kernels import crc32c, frames, memory
from lockstep.storage.kernels.frames import FRAMING_BYTES, HEADER_BYTES, data_matches, scan
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u8, load_u32, load_u64, same, store_u8, store_u32, store_u64

_kernel = kernels(__name__, layout, varints, crc32c, frames, memory)

# The addresses for a field's values and its validity bytes (0: not written), and its row of `starts` and `sizes`.
VALUES, VALID, VARIABLE = range(3)
OUT_COLUMNS = 3
# The checksums read a block first, which loads it into the L1 cache; then each field's loop reads it.
_BLOCK_BYTES = 16 << 10
_BLOCK_ROWS = 128


@njit(forceinline=True)
def _body(at: Any, end: Any, name: Any, name_size: Any, tag: Any) -> Any:
    """The start and end of a list message's body; start 0 if another entry is at `at`, -1 for a malformed one."""
    if end - at < name_size + 4 or load_u8(at) != 0x0A:
        return 0, 0
    size, start = read_length(at + 1, end)
    if end - start <= name_size or not same(start, name, name_size):
        return 0, 0
    stop = start + size
    feature, start = read_length(start + name_size, end)
    if size < 0 or feature < 2 or stop > end or start + feature != stop or load_u8(start) != tag:
        return -1, 0
    body, start = read_length(start + 1, stop)
    if body < 0 or start + body != stop:
        return -1, 0
    return start, stop


@njit(forceinline=True)
def _item(at: Any, end: Any) -> Any:
    """The start and end of one item of bytes; start -1 for none."""
    if at >= end or load_u8(at) != 0x0A:
        return -1, 0
    size, start = read_length(at + 1, end)
    if size < 0 or end - start < size:
        return -1, 0
    return start, start + size


@njit(forceinline=True)
def _count(kind: Any, width: Any, start: Any, stop: Any) -> Any:
    """The number of values in the body of a list, -1 if it is malformed. Packed numbers come without their head."""
    count = 0
    if kind == INT_LIST:
        for at in range(start, stop):
            count += load_u8(at) < 128
        return count if start == stop or load_u8(stop - 1) < 128 else -1
    if kind == BOOL_LIST:
        for at in range(start, stop):
            if load_u8(at) > 1:
                return -1
        return stop - start
    if kind == FIXED_LIST and width == 4:
        return (stop - start) // 4 if (stop - start) % 4 == 0 else -1
    at = start
    while at < stop:
        value, at_end = _item(at, stop)
        if value < 0 or (kind == FIXED_LIST and at_end - value != 8):
            return -1
        at = at_end
        count += 1
    return count


@njit(forceinline=True)
def read_variable(
    kind: Any,
    name: Any,
    name_size: Any,
    tag: Any,
    width: Any,
    valid: Any,
    starts: Any,
    sizes: Any,
    first: Any,
    at: Any,
    ends: Any,
    rows: Any,
) -> Any:
    """Write the address of each row's bytes or list values to `starts`, and their number to `sizes`."""
    for row in range(rows):
        start, stop = _body(at[row], ends[row], name, name_size, tag)
        if start < 0 or (start == 0 and valid == 0):
            return False
        if valid != 0:
            store_u8(valid + first + row, np.uint8(start != 0))
        sizes[first + row] = 0
        if start == 0:
            continue
        at[row] = stop
        if kind == BYTES:
            start, item_stop = _item(start, stop)
            if start < 0 or item_stop != stop:
                return False
            starts[first + row], sizes[first + row] = start, stop - start
            continue
        if start != stop and (kind in (INT_LIST, BOOL_LIST) or (kind == FIXED_LIST and width == 4)):
            start, item_stop = _item(start, stop)
            if start < 0 or item_stop != stop or start == stop:
                return False
        count = _count(kind, width, start, stop)
        if count < 0:
            return False
        starts[first + row], sizes[first + row] = start, count
    return True


@_kernel
def gather(starts: Any, sizes: Any, offsets: Any, target: Any) -> None:
    """Copy each row's bytes to target + offsets[row]; `offsets` (n + 1,) int32."""
    for row in range(len(starts)):
        copy(target + offsets[row], starts[row], sizes[row])


@_kernel
def item_ends(starts: Any, sizes: Any, offsets: Any) -> Any:
    """Write to `offsets[1:]` (int32) where each item of all rows' byte lists ends when stored end to end.

    Returns their bytes in all, -1 if they exceed 2^31 - 1.
    """
    total, item = 0, 0
    for row in range(len(starts)):
        at = starts[row]
        for _ in range(sizes[row]):
            size, start = read_length(at + 1, at + 11)
            at = start + size
            total += size
            if total > 0x7FFFFFFF:
                return -1
            item += 1
            offsets[item] = total
    return total


@_kernel
def list_values(kind: Any, width: Any, starts: Any, sizes: Any, target: Any) -> Any:
    """Write the values of all rows' lists end to end to the address `target`: int64, bools as bytes, floats, bytes.

    Returns False for a number of more than 64 bits.
    """
    for row in range(len(starts)):
        at = starts[row]
        for _ in range(sizes[row]):
            if kind == INT_LIST:
                size = 1
                while size < 10 and load_u8(at + size - 1) > 127:
                    size += 1
                value, good = read_number(at, size, at + size)
                if not good:
                    return False
                store_u64(target, value)
                at += size
                target += 8
            elif kind == BOOL_LIST:
                store_u8(target, load_u8(at))
                at += 1
                target += 1
            elif kind == FIXED_LIST and width == 4:
                store_u32(target, load_u32(at))
                at += 4
                target += 4
            elif kind == FIXED_LIST:
                store_u64(target, load_u64(at + 2))
                at += 10
                target += 8
            else:
                size, start = read_length(at + 1, at + 11)
                copy(target, start, size)
                at = start + size
                target += size
    return True


@njit(forceinline=True)
def _head_of(at: Any, end: Any, heads: Any, stride: Any, head_sizes: Any) -> Any:
    """The bytes of the number whose head is at `at`, 0 for none: the last byte of a head has its size."""
    size = head_sizes[1]
    if end - at > size:
        said: Any = np.int64(load_u8(at + size - 1))
        if 1 <= said <= 10 and head_sizes[said] == size and same(at, heads + stride * said, size):
            return said
    if head_sizes[10] != size:  # a long name: for larger numbers, its lengths take two bytes or more
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
    """Read values with a constant head: bools, floats, tensors."""
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


@njit(forceinline=True)
def _rows_at_once(offsets: Any, first: Any) -> Any:
    """How many records from `first` on are a block: one, and more that fit into _BLOCK_BYTES and _BLOCK_ROWS."""
    most = min(_BLOCK_ROWS, len(offsets) - 1 - first)
    rows = 1
    while rows < most and offsets[first + rows + 1] - offsets[first] <= _BLOCK_BYTES:
        rows += 1
    return rows


@njit(forceinline=True)
def _find_bodies(source: Any, offsets: Any, first: Any, at: Any, ends: Any, rows: Any) -> Any:
    """Find where the features of each record of a block begin and end; False for a checksum or a form that is wrong."""
    for row in range(rows):
        start, end = source + offsets[first + row], source + offsets[first + row + 1]
        if not data_matches(start, end - start):
            return False
        start, end = start + HEADER_BYTES, end - (FRAMING_BYTES - HEADER_BYTES)
        if start >= end or load_u8(start) != 0x0A:
            return False
        size, start = read_length(start + 1, end)
        if start + size != end:
            return False
        at[row], ends[row] = start, end
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
    """Read the records at source + offsets[row], (n + 1,) int64, and check the checksums of their data.

    Returns whether these match and all records have the form that the encoder writes. Numbers and tensors are written
    to the addresses in `outs`, (k, 3) int64. For fields of variable size the address of each row's bytes or list values
    is written to `starts`, and their number to `sizes`, (v, n) int64. The first `done` rows are from other buffers.
    """
    records, first, rows = len(offsets) - 1, 0, 0
    at, ends = np.empty(_BLOCK_ROWS, dtype=np.int64), np.empty(_BLOCK_ROWS, dtype=np.int64)
    while first + rows < records:
        first += rows
        rows = _rows_at_once(offsets, first)
        if not _find_bodies(source, offsets, first, at, ends, rows):
            return False
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
    """Decode, as `decode` does, the records of several buffers in order; parts (3, p) int64 has the address, the bytes
    and the number of records of each. Also returns False if a buffer does not have exactly that many whole records.
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
