"""A table of rows, one for each id, in shards over the ranks. No TensorFlow.

Ids are mixed by multiplication modulo the table's size, a bijection that spreads neighbouring ids evenly (Fibonacci
hashing: Knuth, The Art of Computer Programming 3, 6.4). The table is cut into SHARDS virtual shards, which are dealt
over the ranks in order, so another number of ranks moves whole shards. A step sends each rank's distinct ids to the
ranks that own their rows, and these send the rows back; gradients go the same way, are added in the order of the ranks,
and are applied by their owner with row-wise Adagrad, one accumulator a row (Mudigere et al., "Software-Hardware
Co-design for Fast and Scalable Training of Deep Learning Recommendation Models", 2022; FBGEMM's
EXACT_ROWWISE_ADAGRAD). docs/embeddings.md.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import DataError, require
from training.comm.base import Communicator, part_bounds
from training.strategies.table_kernels import adagrad, add_by_place, draw, gather

Array = NDArray[Any]
Positions = NDArray[np.int64]
SHARDS = 256
MAX_ROWS = 2**31 - SHARDS  # products of two positions must fit into 63 bits
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a table is; the same on all ranks. Raises ConfigError for invalid values."""

    name: str
    rows: int
    """Ids are 0 to rows - 1."""
    width: int
    """Numbers of a row."""
    dtype: str = "float32"
    """float32 or float64."""
    seed: int = 0
    spread: float = 0.05
    """First values are from -spread to spread, a function of seed, name and row."""
    learning_rate: float = 0.05
    """Of row-wise Adagrad."""

    def __post_init__(self) -> None:
        where = f"the table {self.name}"
        _require(1 <= self.rows <= MAX_ROWS, f"{where}: rows", self.rows, f"1 to {MAX_ROWS}")
        _require(self.width >= 1, f"{where}: width", self.width, "1 or more")
        _require(self.dtype in ("float32", "float64"), f"{where}: dtype", self.dtype, "float32, float64")
        _require(math.isfinite(self.spread) and self.spread >= 0, f"{where}: spread", self.spread, "0 or more")
        good = math.isfinite(self.learning_rate) and self.learning_rate > 0
        _require(good, f"{where}: learning_rate", self.learning_rate, "above 0")

    @property
    def padded(self) -> int:
        """Rows of the whole table: whole shards."""
        return SHARDS * -(-self.rows // SHARDS)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table with its accumulators."""
        return self.padded * (self.width + 1) * np.dtype(self.dtype).itemsize

    def positions(self, ids: Array) -> Positions:
        """The positions of `ids` (n,) in the whole table: int64. Raises DataError for an id outside of the table."""
        ids = ids.astype(np.int64, copy=False)
        if ids.size and (ids.min() < 0 or ids.max() >= self.rows):
            wrong = ids[(ids < 0) | (ids >= self.rows)]
            raise DataError(
                f"the table {self.name} has no row for an id",
                got=f"id {wrong[0]}, {wrong.size} such ids in the batch",
                allowed=f"0 to {self.rows - 1}",
                next_step="Give the layer more rows, or correct the column.",
            )
        return ids * _multiplier(self.padded) % self.padded

    def dtype_of(self, number: float) -> Any:
        """`number` in the table's dtype."""
        return np.dtype(self.dtype).type(number)

    def bounds(self, num_ranks: int) -> list[tuple[int, int]]:
        """First and last position (excluded) of each rank's rows. Raises ConfigError for more ranks than shards."""
        _require(num_ranks <= SHARDS, f"the table {self.name}: ranks", num_ranks, f"at most {SHARDS}, its shards")
        each = self.padded // SHARDS
        return [(start * each, stop * each) for start, stop in part_bounds(SHARDS, num_ranks)]


def _require(condition: bool, what: str, got: object, allowed: str) -> None:
    require(condition, what, str(got), allowed, "Correct the layer's arguments.")


def _multiplier(size: int) -> int:
    """The integer nearest below size / golden ratio that has no divisor in common with `size`."""
    found = max(1, int(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(found, size) > 1:
        found -= 1
    return found


@dataclass(slots=True)
class _LookUp:
    """One look-up of a training step, kept until its gradient is there."""

    places: Positions
    """(n,): the place of each id's row among the distinct ones."""
    distinct: int
    counts: list[int]
    """Distinct ids that were asked of each rank."""
    asked: list[Positions]
    """Positions that each rank has asked of this one."""


class ShardedTable:
    """This rank's rows of a table, and its part in look-ups and updates. Every rank makes the same calls.

    `scale` is this rank's share of the global batch, by which gradients are multiplied before they are added.
    """

    def __init__(self, options: TableOptions, communicator: Communicator, scale: float = 1.0) -> None:
        self.options, self._comm, self._scale = options, communicator, scale
        bounds = options.bounds(communicator.num_ranks)
        self._edges = np.array([start for start, _ in bounds][1:], np.int64)
        self.first, self.stop = bounds[communicator.rank]
        digest = hashlib.sha256(f"table {options.name} {options.seed}".encode()).digest()
        self.rows: Array = np.empty((self.stop - self.first, options.width), options.dtype)
        """(n, width): rows `first` to `stop` of the whole table, by position."""
        draw(self.rows, self.first, np.uint64(int.from_bytes(digest[:8], "little")), options.spread)
        self.squares: Array = np.zeros(len(self.rows), options.dtype)
        """(n,): Adagrad's accumulators."""
        self._open: dict[int, _LookUp] = {}
        self._count = 0
        self._sums: list[tuple[Positions, Array]] = []

    def look_up(self, ids: Array, *, keep: bool) -> tuple[Array, int]:
        """The rows (*ids.shape, width) of `ids`, any shape, and a number for `take_gradient`. A collective.

        `keep`: whether the gradient will be asked for. Raises DataError for an id outside of the table.
        """
        positions, places = np.unique(self.options.positions(ids.reshape(-1)), return_inverse=True)
        cuts = [0, *np.searchsorted(positions, self._edges).tolist(), len(positions)]
        asked = self._comm.all_to_all_ragged([positions[a:b] for a, b in itertools.pairwise(cuts)])
        width = self.options.width
        found = self._comm.all_to_all_ragged([self._rows_at(chosen).reshape(-1) for chosen in asked])
        distinct = found[0] if len(found) == 1 else np.concatenate(found)
        out = np.empty((ids.size, width), self.options.dtype)
        gather(distinct.reshape(-1, width), places, 0, out)
        self._count += 1
        if keep:
            counts = [part.size // width for part in found]
            self._open[self._count] = _LookUp(places, len(positions), counts, asked)
        return out.reshape(*ids.shape, width), self._count

    def take_gradient(self, number: int, gradient: Array) -> bool:
        """Send the gradient (*ids.shape, width) of look-up `number` to the owners of the rows. A collective.

        Returns whether this rank's part, and the sums that it owns of finite parts, are finite.
        """
        one, width = self._open.pop(number), self.options.width
        mine = np.zeros((one.distinct, width), self.options.dtype)
        add_by_place(gradient.reshape(-1, width), one.places, self.options.dtype_of(self._scale), mine)
        cuts = np.cumsum([0, *one.counts]).tolist()
        parts = [mine[a:b].reshape(-1) for a, b in itertools.pairwise(cuts)]
        got = np.concatenate(self._comm.all_to_all_ragged(parts)).reshape(-1, width)
        chosen, sums = _added(np.concatenate(one.asked), got)
        self._sums.append((chosen, sums))
        # A rank that sent what is not finite says so itself, with its samples.
        return bool(np.isfinite(mine).all() and (np.isfinite(sums).all() or not np.isfinite(got).all()))

    def commit(self, *, skipped: bool) -> None:
        """At the end of a step: apply the gradients of its look-ups, unless the ranks have skipped it."""
        taken, self._sums = self._sums, []
        self._open.clear()
        if skipped or not taken:
            return
        chosen, sums = taken[0]
        if len(taken) > 1:
            chosen, sums = _added(*(np.concatenate(part) for part in zip(*taken, strict=True)))
        rate, epsilon = (self.options.dtype_of(number) for number in (self.options.learning_rate, EPSILON))
        adagrad(self.rows, self.squares, chosen, self.first, sums, rate, epsilon)

    def _rows_at(self, chosen: Positions) -> Array:
        out = np.empty((len(chosen), self.options.width), self.options.dtype)
        gather(self.rows, chosen, self.first, out)
        return out


def _added(chosen: Positions, values: Array) -> tuple[Positions, Array]:
    """Each position once, rising, and the sum of its values (n, width) in their order."""
    positions, places = np.unique(chosen, return_inverse=True)
    sums = np.zeros((len(positions), values.shape[1]), values.dtype)
    add_by_place(values, places, values.dtype.type(1), sums)
    return positions, sums
