"""Computes the orders of windows as lockstep.training.plan.permutation does, without the cost of NumPy's sort."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _64 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(64)


@njit
def _mix(value: Any) -> Any:
    """Compute splitmix64, as lockstep.features.sample_id does."""
    value += _GOLDEN
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


@_kernel
def sort(hashes: Any, order: Any) -> None:
    """Write the stable order of hashes (n,) uint64 to `order` (n,) int64: a bucket sort by their first bits, with about
    one hash a bucket, then an insertion sort.
    """
    count, bits = len(hashes), 1
    while (1 << bits) < count:
        bits += 1
    shift = _64 - np.uint64(bits)
    ends = np.zeros((1 << bits) + 1, dtype=np.int64)
    for number in range(count):
        ends[np.int64(hashes[number] >> shift) + 1] += 1
    for before in range(1 << bits):
        ends[before + 1] += ends[before]
    for number in range(count):
        bucket = np.int64(hashes[number] >> shift)
        order[ends[bucket]] = number
        ends[bucket] += 1
    for number in range(1, count):
        here, at = order[number], number
        value = hashes[here]
        while at > 0 and hashes[order[at - 1]] > value:
            order[at] = order[at - 1]
            at -= 1
        order[at] = here


@_kernel
def orders(starts: Any, found: Any) -> None:
    """Write the order of each key to found (n, count) int64; `starts` (n,) uint64 are the keys' first 8 bytes."""
    count = found.shape[1]
    numbers, hashes = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.uint64)
    for number in range(count):
        numbers[number] = _mix(np.uint64(number))
    for key in range(len(starts)):
        start = _mix(starts[key])
        for number in range(count):
            hashes[number] = _mix(start ^ numbers[number])
        sort(hashes, found[key])
