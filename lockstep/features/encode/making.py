"""How a model's array is made of a column, in two steps: what needs the value, early; what makes it large, late.

A column of thousands of rows in the order of a file is worked on at once, then its rows are put into the order of
batches, and only there a category becomes a row of zeros and a one, a list a padded sequence, a byte a float. So what
waits in memory is small, and what is costly is done many rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.schema.signature import TensorSpec


@dataclass(frozen=True, slots=True)
class Lists:
    """n rows of any number of values each: row i has values[offsets[i]:offsets[i + 1]]; offsets (n + 1,) int64."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Values of each row, (n,)."""
        return np.diff(self.offsets)


Early = Callable[[pa.Array], NDArray[Any] | Lists]
Late = Callable[[Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One array: `late(early(column))` is what a model is fed, where `late` is None what `early` gives.

    Each row of what `early` gives depends on that row of the column alone.
    """

    spec: TensorSpec
    """What a model is fed of a row."""
    early: Early
    """From a column of n rows to an array (n, *row.shape) of row.dtype, or to Lists of such values."""
    row: TensorSpec
    """A row of what `early` gives; of Lists, one value."""
    lists: bool = False
    """Whether `early` gives Lists."""
    late: Late | None = None
    """From rows in any order, an array or Lists, to what a model is fed."""
    stored: str | None = None
    """The dtype of what is stored, where a row of `early` is that as it lies, or an int64 as the same float32."""
    borrowed: bool = False
    """Whether what `early` gives is the column's own memory."""

    def whole(self, column: pa.Array) -> NDArray[Any]:
        """Both steps: what a model is fed of a column, in an array of its own."""
        rows = self.early(column)
        if self.late is not None:
            return self.late(rows)
        assert isinstance(rows, np.ndarray)
        return rows.copy() if self.borrowed else rows


def at_once(spec: TensorSpec, early: Callable[[pa.Array], NDArray[Any]], stored: str | None = None) -> Made:
    """An array that is small enough to be made whole in the first step."""
    return Made(spec=spec, early=early, row=TensorSpec(shape=spec.shape, dtype=spec.dtype), stored=stored)


def lists_of(column: pa.Array, values: NDArray[Any]) -> Lists:
    """The rows of a column of lists, whose flattened values became `values`; a null row has none."""
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    if not len(column):
        return Lists(values, np.zeros(1, dtype=np.int64))
    if column.null_count:
        counts = np.where(np.asarray(column.is_valid()), np.diff(offsets), 0)
        return Lists(values, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    return Lists(values, offsets.astype(np.int64) - int(offsets[0]))
