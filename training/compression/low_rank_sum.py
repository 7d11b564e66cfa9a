"""Sums of matrices of low rank: Vogels, Karimireddy and Jaggi, "PowerSGD" (NeurIPS 2019), with its error feedback.

Each step does one round of power iteration from the last step's factors (warm start). Vectors, and matrices that two
factors would not make smaller, travel whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.training.comm.base import Communicator
from lockstep.training.compression.bucket_sum import Array, BucketSum, Placed, key_of
from lockstep.training.compression.method import Compression


class Matrix(NamedTuple):
    """A tensor as a matrix: all axes but the last are rows."""

    name: str
    start: int
    rows: int
    columns: int

    def of(self, flat: Array) -> Array:
        """Return this tensor's view (rows, columns) of a bucket (size,)."""
        return flat[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


class LowRankSum(BucketSum):
    """Two sums over all ranks of factors (rows, rank) and (columns, rank), whose product is the sum's."""

    def __init__(
        self, communicator: Communicator, method: Compression, number: int, size: int, tensors: Sequence[Placed]
    ) -> None:
        super().__init__(communicator, method, number, size, tensors)
        self._rank, self._matrices, self._whole = int(method.value), [], np.ones(size, bool)
        for start, shape in self.tensors:
            columns = shape[-1] if shape else 1
            rows = math.prod(shape) // max(1, columns)
            rank = min(self._rank, rows, columns)
            if rank * (rows + columns) < rows * columns:
                matrix = Matrix(f"factor-{start}", start, rows, columns)
                self._matrices.append(matrix)
                self._whole[start : start + rows * columns] = False
                draws = np.random.Generator(np.random.Philox(key_of(method.seed, number, start)))
                self.common[matrix.name] = draws.standard_normal((columns, rank)).astype(np.float32)
        self.clear_gaps(self._whole)
        self.kept["residual"] = np.zeros(size, np.float32)

    def reduce(self, flat: Array, step: int) -> None:
        residual, factors = self.kept["residual"], self.common
        self.clear_gaps(flat)
        flat += residual
        lefts = [matrix.of(flat) @ factors[matrix.name] for matrix in self._matrices]
        first = self._summed([flat[self._whole], *lefts])
        lefts = [_orthonormal(left) for left in first[1:]]
        rights = [matrix.of(flat).T @ left for matrix, left in zip(self._matrices, lefts, strict=True)]
        sums = self._summed(rights)
        for matrix, left, right, total in zip(self._matrices, lefts, rights, sums, strict=True):
            np.subtract(matrix.of(flat), _product(left, right), out=matrix.of(residual))
            matrix.of(flat)[:] = _product(left, total)
            factors[matrix.name][:] = total
        flat[self._whole] = first[0]

    def _summed(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays' sums over ranks, in one message."""
        flat = self.communicator.allocate(sum(array.size for array in arrays), np.float32)
        np.concatenate([array.reshape(-1) for array in arrays], out=flat) if arrays else None
        if flat.size:
            self.communicator.all_reduce(flat)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        return [flat[end - array.size : end].reshape(array.shape) for array, end in zip(arrays, ends, strict=True)]


def _product(left: Array, right: Array) -> Array:
    """Multiply left (rows, rank) by right (columns, rank) transposed, with the same bits on every rank: no library
    decides how.
    """
    total = left[:, :1] * right[:, 0]
    for column in range(1, left.shape[1]):
        total += left[:, column : column + 1] * right[:, column]
    return total


def _orthonormal(matrix: Array) -> Array:
    """The columns of `matrix` (rows, rank), made orthonormal from left to right (Gram and Schmidt, modified); one that
    depends on those before it becomes 0.
    """
    wide = matrix.astype(np.float64)
    for column in range(wide.shape[1]):
        mine = wide[:, column]
        before = float(np.sqrt(np.sum(mine * mine)))
        for other in range(column):
            mine -= np.sum(mine * wide[:, other]) * wide[:, other]
        norm = float(np.sqrt(np.sum(mine * mine)))
        mine *= 1.0 / norm if norm > 1e-7 * before else 0.0 if np.isfinite(norm) else np.nan
    return wide.astype(np.float32)
