"""Reuses the memory of large arrays: the system hands out cleared pages, which costs as much as a copy."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALL_BYTES = 64 << 10  # the allocator itself keeps smaller pieces
_GRAIN_BYTES = 64 << 10  # sizes are rounded up to it, so that the memory fits the next array too
_MOST_FREE_BYTES = 48 << 20


class Slabs:
    """Hands out arrays; takes the memory of an array back when the array and all its views are gone."""

    def __init__(self, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        self._most_free_bytes, self._free_bytes = most_free_bytes, 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised array, as np.empty returns it."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _SMALL_BYTES:
            return np.empty(shape, dtype=kind)
        room = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
        free = self._free[room]
        try:
            memory = free.pop()  # atomic: another thread may give memory back meanwhile
            self._free_bytes -= room
        except IndexError:
            memory = np.empty(room, dtype=np.uint8)
        # The base of a NumPy view is the array that owns the memory: this one lives as long as any view.
        owner = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return owner[:size].view(kind).reshape(shape)

    def _give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        if self._free_bytes + len(memory) <= self._most_free_bytes:
            self._free_bytes += len(memory)
            self._free[len(memory)].append(memory)
