"""Memory comes back when nobody sees it any more, and not before."""

from __future__ import annotations

import numpy as np

from lockstep.training.reading.buffer_pool import Slabs

SHAPE = (1000, 32)


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    slabs = Slabs()
    first = slabs.array(SHAPE, np.int64)
    place, view = first.ctypes.data, first[3:5].view(np.uint8)
    view[:] = 7
    del first
    other = slabs.array(SHAPE, np.int64)
    assert other.ctypes.data != place  # a view of the first is left
    assert (view == 7).all()
    del view
    assert slabs.array((32, 1001), np.int64).ctypes.data == place  # of another size, that fits


def test_what_is_kept_for_later_is_bounded() -> None:
    slabs = Slabs(most_free_bytes=300_000)
    arrays = [slabs.array(SHAPE, np.int64) for _ in range(4)]
    places = {array.ctypes.data for array in arrays}
    assert len(places) == 4
    del arrays
    assert slabs.array(SHAPE, np.int64).shape == SHAPE
    assert slabs._free_bytes <= 300_000


def test_small_and_empty_arrays() -> None:
    assert Slabs().array((0, 5), np.float32).shape == (0, 5)
    assert Slabs().array((3,), np.uint8).shape == (3,)
