"""Gradients of embeddings: the rows that a batch touched, exchanged as rows while that is fewer bytes.

A gradient by rows has indices (n,) and values (n, *row); an index may repeat. Each rank first adds up its own
duplicates, so that norms and squares of the result are those of the whole tensor. Ranks gather their sizes, so that all
choose the same way: rows of all ranks by two ragged gathers, added in rank order, or the whole tensor by one
all_reduce. No TensorFlow here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.comm.base import Communicator

Array = NDArray[Any]
ROWS_FROM_BYTES = 256 << 10  # a smaller tensor is sent whole in a bucket: three messages of its own would cost more
INDEX = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Table:
    """A variable whose gradient is exchanged by rows."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's shape: (rows, *row)."""
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes sent for one row: its values and its index."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize + INDEX.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """A sum over ranks: `indices` (n,) int64, rising, each once; `values` (n, *row).

    If the whole tensor was sent, all its rows are here.
    """

    indices: Array
    values: Array


def goes_by_rows(table: Table, total_rows: int) -> bool:
    """Whether `total_rows`, of all ranks together, are fewer bytes than the whole tensor.

    In a ring of N ranks a gather moves (N - 1) / N of all rows through each rank, an all_reduce 2 (N - 1) / N of the
    tensor.
    """
    return total_rows * table.row_bytes < 2 * table.whole_bytes


def added_up(indices: Array, values: Array) -> tuple[Array, Array]:
    """Each index once, rising, and the sum of its values in their order; takes (n,) and (n, *row)."""
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.ones(len(indices), bool)
    first[1:] = indices[1:] != indices[:-1]
    if first.all():
        return indices, values
    starts = np.flatnonzero(first)
    with np.errstate(all="ignore"):  # the check of the sums finds values that are not finite
        return indices[starts], np.add.reduceat(values, starts, axis=0)


def sum_rows(communicator: Communicator, table: Table, indices: Array, values: Array) -> Rows:
    """The sum of all ranks' gradients of `table`, equal bit for bit on every rank; a collective.

    `indices` (n,) within the table, `values` (n, *row) of its dtype, already scaled. Raises the communicator's errors.
    """
    indices, values = added_up(indices.astype(INDEX, copy=False), values)
    if communicator.num_ranks == 1:
        return Rows(indices, values)
    total = int(communicator.all_gather(np.array([len(indices)], INDEX)).sum())
    if goes_by_rows(table, total):
        all_indices = np.concatenate(communicator.all_gather_ragged(indices))
        flat = np.concatenate(communicator.all_gather_ragged(np.ascontiguousarray(values).reshape(-1)))
        return Rows(*added_up(all_indices, flat.reshape(-1, *table.shape[1:])))
    # Zeroing the whole is cheap compared with the sum, which happens only if ranks' rows are nearly twice the table's.
    flat = communicator.allocate(math.prod(table.shape), table.dtype)
    whole = flat.reshape(table.shape)
    whole[indices] = values
    communicator.all_reduce(flat)
    return Rows(np.arange(table.shape[0], dtype=INDEX), whole)
