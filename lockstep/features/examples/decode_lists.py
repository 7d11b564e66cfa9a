"""Values of bytes and lists out of records: where they lie, how many they are, and their copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples import layout, varints
from lockstep.features.examples.layout import BOOL_LIST, BYTES, FIXED_LIST, INT_LIST
from lockstep.features.examples.varints import read_length, read_number
from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u8, load_u32, load_u64, same, store_u8, store_u32, store_u64

_kernel = kernels(__name__, layout, varints, memory)


@njit(forceinline=True)
def _body(at: Any, end: Any, name: Any, name_size: Any, tag: Any) -> Any:
    """Where the body of a list message begins and ends; 0 where another entry stands here, -1 for a wrong one."""
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
    """Where one item of bytes begins and ends; -1 for none."""
    if at >= end or load_u8(at) != 0x0A:
        return -1, 0
    size, start = read_length(at + 1, end)
    if size < 0 or end - start < size:
        return -1, 0
    return start, start + size


@njit(forceinline=True)
def _count(kind: Any, width: Any, start: Any, stop: Any) -> Any:
    """How many values the body of a list has; -1 for one of another form. Packed numbers come without their head."""
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
    """Where the bytes of a value or the values of a list lie, into `starts`; how many they are into `sizes`."""
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
    """Where each item of all rows' byte lists ends when they lie end to end, into `offsets[1:]` (int32); their bytes.

    -1 where these are more than 32 bits hold.
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
    """Write the values of all rows' lists end to end to the address `target`: int64, bytes of bool, floats, bytes.

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
