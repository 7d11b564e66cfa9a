"""Kernels for XXH64 and for a hash table of tokens; lockstep/features/encode/hashing.py is their interface.

XXH64 is the 64-bit xxHash of Y. Collet: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)

P1 = np.uint64(0x9E3779B185EBCA87)
P2 = np.uint64(0xC2B2AE3D27D4EB4F)
P3 = np.uint64(0x165667B19E3779F9)
P4 = np.uint64(0x85EBCA77C2B2AE63)
P5 = np.uint64(0x27D4EB2F165667C5)
_BYTE, _WORD = np.uint64(8), np.uint64(64)


@_kernel
def _rotated(value: Any, bits: Any) -> Any:
    return (value << bits) | (value >> (_WORD - bits))


@_kernel
def _read(data: Any, at: Any, count: Any) -> Any:
    """Read `count` bytes from `at` on as a little-endian number."""
    value = np.uint64(0)
    for index in range(count):
        value |= np.uint64(data[at + index]) << (_BYTE * np.uint64(index))
    return value


@_kernel
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * P2, np.uint64(31)) * P1


@_kernel
def _merged(value: Any, lane: Any) -> Any:
    return (value ^ _round(np.uint64(0), lane)) * P1 + P4


@_kernel
def _with_word(value: Any, word: Any) -> Any:
    return _rotated(value ^ _round(np.uint64(0), word), np.uint64(27)) * P1 + P4


@_kernel
def _mixed(value: Any) -> Any:
    """The final avalanche, after which each bit of the hash depends on all bits of `value`."""
    value = (value ^ (value >> np.uint64(33))) * P2
    value = (value ^ (value >> np.uint64(29))) * P3
    return value ^ (value >> np.uint64(32))


@_kernel
def xxh64(data: Any, start: Any, stop: Any, seed: Any) -> Any:
    """The hash of data[start:stop] (uint8) as uint64."""
    at = start
    if stop - start >= 32:
        one, two, three, four = seed + P1 + P2, seed + P2, seed, seed - P1
        while stop - at >= 32:
            one = _round(one, _read(data, at, 8))
            two = _round(two, _read(data, at + 8, 8))
            three = _round(three, _read(data, at + 16, 8))
            four = _round(four, _read(data, at + 24, 8))
            at += 32
        value = _rotated(one, np.uint64(1)) + _rotated(two, np.uint64(7))
        value += _rotated(three, np.uint64(12)) + _rotated(four, np.uint64(18))
        value = _merged(_merged(_merged(_merged(value, one), two), three), four)
    else:
        value = seed + P5
    value += np.uint64(stop - start)
    while stop - at >= 8:
        value = _with_word(value, _read(data, at, 8))
        at += 8
    if stop - at >= 4:
        value = _rotated(value ^ (_read(data, at, 4) * P1), np.uint64(23)) * P2 + P3
        at += 4
    while at < stop:
        value = _rotated(value ^ (np.uint64(data[at]) * P5), np.uint64(11)) * P1
        at += 1
    return _mixed(value)


@_kernel
def hash_each(offsets: Any, data: Any, seed: Any, out: Any) -> None:
    """out[i] = the hash of data[offsets[i]:offsets[i + 1]]."""
    for row in range(len(out)):
        out[row] = xxh64(data, offsets[row], offsets[row + 1], seed)


@_kernel
def hash_words(words: Any, seed: Any, out: Any) -> None:
    """out[i] = the hash of words[i] (uint64) as 8 little-endian bytes."""
    for row in range(len(out)):
        out[row] = _mixed(_with_word(seed + P5 + np.uint64(8), words[row]))


@_kernel
def fill_table(hashes: NDArray[np.uint64], slots: NDArray[np.int64]) -> None:
    """Insert the index of each hash by linear probing; the number of slots is a power of two, -1 is a free slot."""
    last = np.uint64(len(slots) - 1)
    for number in range(len(hashes)):
        place = hashes[number] & last
        while slots[place] >= 0:
            place = (place + np.uint64(1)) & last
        slots[place] = number


@_kernel
def find_each(
    offsets: Any, data: Any, hashes: Any, slots: Any, known_offsets: Any, known_data: Any, known_hashes: Any, out: Any
) -> None:
    """out[i] = the index of the token that equals data[offsets[i]:offsets[i + 1]], -1 if none does."""
    last = np.uint64(len(slots) - 1)
    for row in range(len(out)):
        out[row] = -1
        start, size = np.int64(offsets[row]), np.int64(offsets[row + 1] - offsets[row])
        place = hashes[row] & last
        while slots[place] >= 0:
            number = slots[place]
            known = np.int64(known_offsets[number])
            if known_hashes[number] == hashes[row] and known_offsets[number + 1] - known == size:
                same = True
                for index in range(size):
                    if data[start + index] != known_data[known + index]:
                        same = False
                        break
                if same:
                    out[row] = number
                    break
            place = (place + np.uint64(1)) & last
