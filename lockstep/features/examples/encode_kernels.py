"""Arrow columns in kernels, by the descriptions that lockstep/features/examples/columns.py makes. Parts of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.features.examples.columns import DATA, DATA_BIT, VALID, VALID_BIT
from lockstep.storage.kernels.memory import load_i32, load_i64, load_u8


@njit
def valid(place: Any, row: Any) -> Any:
    """Whether a row has a value."""
    if place[VALID] == 0:
        return True
    bit = place[VALID_BIT] + row
    return (load_u8(place[VALID] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1) != 0


@njit
def bool_at(place: Any, number: Any) -> Any:
    """A value of a column of bools."""
    bit = place[DATA_BIT] + number
    return (load_u8(place[DATA] + (bit >> 3)) >> np.uint8(bit & 7)) & np.uint8(1)


@njit
def offset(address: Any, width: Any, number: Any) -> Any:
    """The offset of a value or list, `width` bytes each from `address` on."""
    if width == 4:
        return np.int64(load_i32(address + 4 * number))
    return load_i64(address + 8 * number)
