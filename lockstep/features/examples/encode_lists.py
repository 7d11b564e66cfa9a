"""Entries of bytes and of lists, whose heads depend on their lengths. Parts of the kernels of encode_kernel.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples.columns import DATA, ENDS, ENDS_WIDTH, LISTS, LISTS_WIDTH
from lockstep.features.examples.encode_kernels import bool_at, offset, valid
from lockstep.features.examples.layout import BOOL_LIST, FIXED_LIST, INT_LIST
from lockstep.features.examples.varints import length_size, store_length, store_varint, varint_size, wrapped
from lockstep.storage.kernels.memory import copy, load_u32, load_u64, store_u8, store_u16, store_u32, store_u64


@njit
def copy_words(target: Any, source: Any, size: Any) -> None:
    for word in range(0, size, 8):
        store_u64(target + word, load_u64(source + word))


@njit
def list_size(kind: Any, place: Any, width: Any, first: Any, last: Any) -> Any:
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
            length = offset(place[ENDS], place[ENDS_WIDTH], item + 1) - offset(place[ENDS], place[ENDS_WIDTH], item)
            size += 1 + length_size(length) + length
    return size


@njit
def is_packed(kind: Any, width: Any) -> Any:
    return kind in (INT_LIST, BOOL_LIST) or (kind == FIXED_LIST and width == 4)


@njit
def _write_name(at: Any, name: Any, name_size: Any, tag: Any, body: Any) -> Any:
    """An entry up to the body of its list message, which has `body` bytes."""
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
