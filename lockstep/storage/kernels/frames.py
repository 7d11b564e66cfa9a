"""Framed records in bulk: where each begins, both checksums checked; their index lines; the checksum of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels import crc32c, memory
from lockstep.storage.kernels.crc32c import extended, masked_crc32c, masked_crc32c_of_word
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import load_u32, load_u64, store_u8

_kernel = kernels(__name__, crc32c, memory)

HEADER_BYTES = 12
FRAMING_BYTES = 16
LINE_MAX_BYTES = 42  # two numbers of up to 20 digits, a blank and a line end


@njit
def data_matches(record: Any, size: Any) -> Any:
    """Whether the data of the record at the address `record`, framed `size` bytes long, match their checksum."""
    data, length = record + HEADER_BYTES, size - FRAMING_BYTES
    return load_u32(data + length) == masked_crc32c(data, length)


@_kernel
def scan(address: Any, size: Any, offsets: Any, check_data: Any) -> Any:
    """Where the records of a buffer begin and the last one ends, into `offsets`, (size // 16 + 1,) int64 at least.

    Returns how many records there are, or -1 where a checksum does not match or the buffer ends within a record. The
    data's own checksums are only looked at with `check_data`.
    """
    count, at = 0, 0
    offsets[0] = 0
    while at < size:
        if size - at < FRAMING_BYTES:
            return -1
        word = load_u64(address + at)
        if load_u32(address + at + 8) != masked_crc32c_of_word(word) or word > np.uint64(size - at - FRAMING_BYTES):
            return -1
        length: Any = np.int64(word)
        if check_data and not data_matches(address + at, length + FRAMING_BYTES):
            return -1
        at += length + FRAMING_BYTES
        count += 1
        offsets[count] = at
    return count


@_kernel
def whole(address: Any, size: Any) -> Any:
    """How many bytes at the beginning of a buffer are whole records, and how many records; no checksum is looked at."""
    count, at = 0, 0
    while size - at >= FRAMING_BYTES:
        word = load_u64(address + at)
        if word > np.uint64(size - at - FRAMING_BYTES):
            break
        length: Any = np.int64(word)
        at += length + FRAMING_BYTES
        count += 1
    return at, count


@_kernel
def crc32c_of(crc: Any, address: Any, size: Any) -> Any:
    """The CRC-32C (uint64) of what had the CRC-32C `crc`, and `size` bytes more."""
    return extended(crc, address, size)


@njit
def _store_digits(at: Any, value: Any) -> Any:
    rest, digits = value // 10, 1
    while rest > 0:
        rest //= 10
        digits += 1
    for place in range(at + digits - 1, at - 1, -1):
        store_u8(place, np.uint8(48 + value % 10))
        value //= 10
    return at + digits


@_kernel
def index_lines(offsets: Any, base: Any, target: Any) -> Any:
    """Write a line "offset size" a record to the address `target`, which has 42 bytes for each; returns where they end.

    `offsets` (n + 1,) int64 are where records begin and the last ends, counted from `base`.
    """
    at = target
    for record in range(len(offsets) - 1):
        at = _store_digits(at, base + offsets[record])
        store_u8(at, np.uint8(32))
        at = _store_digits(at + 1, offsets[record + 1] - offsets[record])
        store_u8(at, np.uint8(10))
        at += 1
    return at
