"""Some steps of a rank's batches on their way: arrays whose rows are put in as they are read, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.encode.making import Lists, Made
from training.batches.buffer_pool import Slabs
from training.batches.decode import Unit


class Chunk:
    """The rows of each column of `made` after the first step of its encoding; Lists as (address, count) of each.

    targets (k,) int64: where the rows of each column begin.
    """

    __slots__ = ("_made", "arrays", "epochs", "kept", "targets")

    def __init__(self, made: Sequence[Made], rows: int, slabs: Slabs) -> None:
        self._made = made
        self.arrays = [
            slabs.array((rows, 2), np.int64) if one.lists else slabs.array((rows, *one.row.shape), one.row.dtype)
            for one in made
        ]
        self.epochs = slabs.array((rows,), np.int64)
        self.targets = np.array([array.ctypes.data for array in self.arrays], dtype=np.int64)
        self.kept: set[Unit] = set()  # whose lists the rows point to

    def columns(self, rows: slice) -> list[npt.NDArray[Any] | Lists]:
        """Some rows of each column; all of them must have been put in."""
        return [_in_order(made, array[rows]) for made, array in zip(self._made, self.arrays, strict=True)]


def row_bytes(made: Made) -> int:
    """Bytes of a row of a column, or of one item of its Lists."""
    return int(np.prod(made.row.shape, dtype=np.int64)) * np.dtype(made.row.dtype).itemsize


def _in_order(made: Made, rows: npt.NDArray[Any]) -> npt.NDArray[Any] | Lists:
    """Rows as they are, and lists copied one behind the other from where they lie."""
    if not made.lists:
        return rows
    from training.batches.kernels import join_lists

    offsets = np.concatenate([[0], np.cumsum(rows[:, 1])]).astype(np.int64)
    values = np.empty((int(offsets[-1]), *made.row.shape), dtype=made.row.dtype)
    join_lists(rows, row_bytes(made), offsets, values.ctypes.data)
    return Lists(values, offsets)
