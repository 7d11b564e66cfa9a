"""Copies by address: all bytes that were meant, and none beside them."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from lockstep.storage.kernels.memory import fence, stream


@njit
def _streamed(target: int, source: int, size: int) -> None:
    stream(target, source, size)
    fence()


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 64, 3072])
def test_stream_copies_from_any_place_to_any_place(size: int) -> None:
    source = np.random.default_rng(size).integers(1, 256, size + 32, dtype=np.uint8)
    for skip in range(17):  # every place of the target within 16 bytes, and so of the source
        for start in (0, 3, 16):
            target = np.zeros(size + 64, dtype=np.uint8)
            _streamed(target.ctypes.data + skip, source.ctypes.data + start, size)
            wanted = np.zeros_like(target)
            wanted[skip : skip + size] = source[start : start + size]
            assert np.array_equal(target, wanted), (skip, start)
