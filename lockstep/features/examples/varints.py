"""Base-128 varints in memory: sizes, writing and reading. Functions that kernels inline; none is itself a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels.memory import leading_zeros, load_u8, load_u64, store_u8, store_u16, store_u64

_HIGH = np.uint64(0x8080808080808080)


@njit
def varint_size(value: Any) -> Any:
    """The bytes of a uint64 as a varint: seven bits in each."""
    return np.int64((np.uint64(640) - leading_zeros(value | np.uint64(1)) * np.uint64(9)) >> np.uint64(6))


@njit
def length_size(length: Any) -> Any:
    """The bytes of a length as a varint."""
    return varint_size(np.uint64(length))


@njit
def wrapped(size: Any) -> Any:
    """The bytes of a message of `size` bytes with its tag and length."""
    return 1 + length_size(size) + size


@njit
def store_length(at: Any, length: Any) -> Any:
    """Write a length; returns the address after it."""
    while length > 127:
        store_u8(at, np.uint8(length & 127 | 128))
        length >>= 7
        at += 1
    store_u8(at, np.uint8(length))
    return at + 1


@njit
def store_varint(at: Any, value: Any, size: Any) -> None:
    """Write a uint64 as a varint of `size` bytes, without a loop over its bytes; stores up to 10 bytes."""
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


@njit(forceinline=True)
def read_length(at: Any, end: Any) -> Any:
    """A length and its end; length -1 if it is cut off, has more than five bytes or more than necessary."""
    value: Any = 0
    shift = 0
    while at < end and shift < 35:
        byte = np.int64(load_u8(at))
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (value if byte != 0 or shift == 0 else -1), at
        shift += 7
    return -1, at


@njit(forceinline=True)
def read_number(at: Any, size: Any, end: Any) -> Any:
    """The varint of exactly `size` bytes (1 to 10) at `at`, and whether it is one and needs all of them."""
    value = np.uint64(0)
    if size > 1 and load_u8(at + size - 1) == 0:
        return value, False
    if size <= 8 and end - at >= 8:
        word = load_u64(at)
        ones = ~np.uint64(0) >> np.uint64(64 - 8 * size)
        if (word & _HIGH & ones) != (_HIGH & (ones >> np.uint64(8))):
            return value, False
        word &= ones & ~_HIGH
        word = (word & np.uint64(0x007F007F007F007F)) | (word & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
        word = (word & np.uint64(0x00003FFF00003FFF)) | (word & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
        return (word & np.uint64(0x0FFFFFFF)) | (word & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4), True
    for place in range(size):
        byte = np.uint64(load_u8(at + place))
        if (byte < np.uint64(128)) != (place == size - 1) or (place == 9 and byte > np.uint64(1)):
            return value, False
        value |= (byte & np.uint64(127)) << np.uint64(7 * place)
    return value, True
