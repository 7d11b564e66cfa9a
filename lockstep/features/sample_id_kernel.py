"""SHA-256 (FIPS 180-4) over the fields of many rows in one call: sample ids and split hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u32, offset, store_u8, store_u32, store_u64

_kernel = kernels(__name__, memory)
_BLOCK_BYTES = 64
_SPLIT = np.frombuffer(b"split", dtype=np.uint8)


def _primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found):
            found.append(number)
        number += 1
    return found


def _root_bits(number: int, power: int) -> int:
    """The first 32 fractional bits of a number's square root (power 2) or cube root (3): the standard's constants."""
    scaled, low, high = number << 32 * power, 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**power <= scaled else (low, middle)
    return low & 0xFFFFFFFF


_START = np.array([_root_bits(prime, 2) for prime in _primes(8)], dtype=np.uint32)
_ROUND = np.array([_root_bits(prime, 3) for prime in _primes(64)], dtype=np.uint32)


# Numba widens sums of 32-bit numbers to 64 bits. Casting each back lets LLVM compute in 32 bits.
@njit
def _turn(value: Any, bits: Any) -> Any:
    return np.uint32((value >> np.uint32(bits)) | (value << np.uint32(32 - bits)))


@njit
def _swap(value: Any) -> Any:
    mixed = np.uint32((value & np.uint32(0xFF00FF)) << np.uint32(8) | (value >> np.uint32(8)) & np.uint32(0xFF00FF))
    return np.uint32(mixed << np.uint32(16) | mixed >> np.uint32(16))


@njit
def _compress(state: Any, words: Any, address: Any) -> None:
    """Take one block of 64 bytes into `state`, (8,) uint32; `words` (64,) uint32 is scratch."""
    for at in range(16):
        words[at] = _swap(load_u32(address + 4 * at))
    for at in range(16, 64):
        early, late = words[at - 15], words[at - 2]
        first = _turn(early, 7) ^ _turn(early, 18) ^ (early >> np.uint32(3))
        second = _turn(late, 17) ^ _turn(late, 19) ^ (late >> np.uint32(10))
        words[at] = np.uint32(words[at - 16] + first + words[at - 7] + second)
    a, b, c, d, e, f, g, h = state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]
    for at in range(64):
        mixed = _turn(e, 6) ^ _turn(e, 11) ^ _turn(e, 25)
        first = np.uint32(h + mixed + ((e & f) ^ (~e & g)) + _ROUND[at] + words[at])
        mixed = _turn(a, 2) ^ _turn(a, 13) ^ _turn(a, 22)
        second = np.uint32(mixed + ((a & b) ^ (a & c) ^ (b & c)))
        h, g, f, e = g, f, e, np.uint32(d + first)
        d, c, b, a = c, b, a, np.uint32(first + second)
    state[0], state[1], state[2], state[3] = state[0] + a, state[1] + b, state[2] + c, state[3] + d
    state[4], state[5], state[6], state[7] = state[4] + e, state[5] + f, state[6] + g, state[7] + h


@njit
def _first_8_bytes(address: Any, size: Any, state: Any, words: Any) -> Any:
    """The first 8 bytes of the digest of `size` bytes, as a little-endian number; overwrites 72 bytes after them."""
    end = (size + 9 + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES
    store_u8(address + size, np.uint8(0x80))
    for at in range(address + size + 1, address + end - 8):
        store_u8(at, np.uint8(0))
    store_u32(address + end - 8, _swap(np.uint32(size >> 29)))
    store_u32(address + end - 4, _swap(np.uint32(size << 3 & 0xFFFFFFFF)))
    state[:] = _START
    for at in range(address, address + end, _BLOCK_BYTES):
        _compress(state, words, at)
    return np.uint64(_swap(state[0])) | np.uint64(_swap(state[1])) << np.uint64(32)


@njit
def _split_head(scratch: Any, seed: Any) -> Any:
    """Write the prefix of a split hash's input; returns the address after it."""
    for at in range(len(_SPLIT)):
        store_u8(scratch + at, _SPLIT[at])
    store_u64(scratch + len(_SPLIT), seed)
    return scratch + len(_SPLIT) + 8


@_kernel
def row_hashes(data: Any, ends: Any, widths: Any, occurrences: Any, scratch: Any, out: Any) -> None:
    """Hash each row's fields, each after its length, and its occurrence number into `out`, (n,) uint64.

    data, ends, widths: (k,) int64: for each column the addresses of its bytes and of its offsets, and the bytes of an
    offset. `scratch` is the address of a buffer for the longest row, 8 more bytes for each field, and 80 bytes.
    """
    state, words = np.empty(8, dtype=np.uint32), np.empty(64, dtype=np.uint32)
    for row in range(len(occurrences)):
        at = scratch
        for column in range(len(data)):
            start = offset(ends[column], widths[column], row)
            size = offset(ends[column], widths[column], row + 1) - start
            store_u64(at, np.uint64(size))
            copy(at + 8, data[column] + start, size)
            at += 8 + size
        store_u64(at, np.uint64(occurrences[row]))
        out[row] = _first_8_bytes(scratch, at + 8 - scratch, state, words)


@_kernel
def unit_hashes(ids: Any, seed: Any, scratch: Any, out: Any) -> None:
    """Write the split hash of each id, (n,) int64, to `out`, (n,) uint64; `scratch` is the address of 128 bytes."""
    state, words = np.empty(8, dtype=np.uint32), np.empty(64, dtype=np.uint32)
    for row in range(len(ids)):
        at = _split_head(scratch, seed)
        store_u64(at, np.uint64(ids[row]))
        out[row] = _first_8_bytes(scratch, at + 8 - scratch, state, words)


@_kernel
def group_hashes(data: Any, offsets: Any, seed: Any, scratch: Any, out: Any) -> None:
    """Write the split hash of each group's name to `out`, (n,) uint64.

    Names are at the address `data`, between `offsets` (n + 1,) int64. `scratch` is the address of a buffer for the
    longest name and 96 bytes.
    """
    state, words = np.empty(8, dtype=np.uint32), np.empty(64, dtype=np.uint32)
    for row in range(len(out)):
        at, size = _split_head(scratch, seed), offsets[row + 1] - offsets[row]
        copy(at, data + offsets[row], size)
        out[row] = _first_8_bytes(scratch, at + size - scratch, state, words)
