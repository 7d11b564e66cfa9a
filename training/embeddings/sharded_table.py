"""A table of rows, one for each id, in shards over the ranks. No TensorFlow.

Ids are mixed by multiplication modulo the table's size, a bijection that spreads neighbouring ids evenly (Fibonacci
hashing: Knuth, The Art of Computer Programming 3, 6.4). The table is cut into SHARDS virtual shards, which are dealt
over the ranks in order, so another number of ranks moves whole shards. A step sends each rank's distinct ids to the
ranks that own their rows, and these send the rows back; gradients go the same way, are added in the order of the ranks,
and are applied by their owner with row-wise Adagrad, one accumulator a row (Mudigere et al., "Software-Hardware
Co-design for Fast and Scalable Training of Deep Learning Recommendation Models", 2022; FBGEMM's
EXACT_ROWWISE_ADAGRAD), or lazy Adam, which leaves rows outside of the batch unchanged. docs/embeddings.md,
docs/decisions/070-tables-in-shards.md.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import DataError, require
from lockstep.training.comm.base import Communicator, part_bounds
from lockstep.training.embeddings.table_kernels import adagrad, adam, add_by_place, draw, gather
from lockstep.training.run.late_copy import LateCopy

Array = NDArray[Any]
Positions = NDArray[np.int64]
SHARDS = 256
MAX_ROWS = 2**31 - SHARDS  # products of two positions must fit into 63 bits
EPSILON = 1e-8
BETAS = (0.9, 0.999)  # of Adam
CHANGED = "changed"
OPTIMIZERS = ("adagrad", "adam")


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a table is; the same on all ranks. Raises ConfigError for invalid values."""

    name: str
    rows: int | None
    """Ids are 0 to rows - 1; None: any int64 (growing_table.py)."""
    width: int
    """Numbers of a row."""
    dtype: str = "float32"
    """The dtype of the rows: float32 or float64."""
    seed: int = 0
    spread: float = 0.05
    """First values are from -spread to spread, a function of seed, name and row."""
    learning_rate: float = 0.05
    """The learning rate of the table's optimizer."""
    optimizer: str = "adagrad"
    """The optimizer of the rows: adagrad (row-wise) or adam (lazy: only rows in the batch change)."""
    admit_after: int = 1
    """In a table without `rows`, an id gets a row once it was seen so many times."""
    evict_after_steps: int | None = None
    """In a table without `rows`, a row that was not seen for so many steps is removed; None: never."""

    def __post_init__(self) -> None:
        where = f"the table {self.name}"
        _require(self.rows is None or 1 <= self.rows <= MAX_ROWS, f"{where}: rows", self.rows, f"1 to {MAX_ROWS}, None")
        _require(self.width >= 1, f"{where}: width", self.width, "1 or more")
        _require(self.dtype in ("float32", "float64"), f"{where}: dtype", self.dtype, "float32, float64")
        _require(math.isfinite(self.spread) and self.spread >= 0, f"{where}: spread", self.spread, "0 or more")
        good = math.isfinite(self.learning_rate) and self.learning_rate > 0
        _require(good, f"{where}: learning_rate", self.learning_rate, "above 0")
        _require(self.optimizer in OPTIMIZERS, f"{where}: optimizer", self.optimizer, ", ".join(OPTIMIZERS))
        _require(self.admit_after >= 1, f"{where}: admit_after", self.admit_after, "1 or more")
        steps = self.evict_after_steps
        _require(steps is None or steps >= 1, f"{where}: evict_after_steps", steps, "1 or more, None")
        bounded = self.rows is not None and (self.admit_after > 1 or steps is not None)
        _require(not bounded, f"{where}: admit_after and evict_after_steps", f"rows={self.rows}", "rows=None")

    @property
    def padded(self) -> int:
        """Rows of the whole table: whole shards; 0 for a table without `rows`, which begins empty."""
        return SHARDS * -(-(self.rows or 0) // SHARDS)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its optimizer's state."""
        numbers = self.width + sum(math.prod(shape) for shape in self.state_shapes.values())
        return numbers * np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table with its optimizer's state; 0 for a table without `rows`."""
        return self.padded * self.row_bytes

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The optimizer's state of a row: name -> shape."""
        return {"squares": ()} if self.optimizer == "adagrad" else {"means": (self.width,), "squares": (self.width,)}

    @property
    def draw_key(self) -> np.uint64:
        """What first values depend on, apart from the row."""
        digest = hashlib.sha256(f"table {self.name} {self.seed}".encode()).digest()
        return np.uint64(int.from_bytes(digest[:8], "little"))

    def positions(self, ids: Array) -> Positions:
        """The positions of `ids` (n,) in the whole table: int64. Raises DataError for an id outside of the table."""
        assert self.rows is not None
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

    def dtype_of(self, number: Any) -> Any:
        """Return `number` in the table's dtype."""
        return np.dtype(self.dtype).type(number)

    def shards_of(self, num_ranks: int) -> list[tuple[int, int]]:
        """First and last (excluded) virtual shard of each rank. Raises ConfigError for more ranks than shards."""
        _require(num_ranks <= SHARDS, f"the table {self.name}: ranks", num_ranks, f"at most {SHARDS}, its shards")
        return part_bounds(SHARDS, num_ranks)

    def bounds(self, num_ranks: int) -> list[tuple[int, int]]:
        """First and last position (excluded) of each rank's rows. Raises ConfigError for more ranks than shards."""
        each = self.padded // SHARDS
        return [(start * each, stop * each) for start, stop in self.shards_of(num_ranks)]

    def update(
        self, step: int, rows: Array, state: dict[str, Array], chosen: Positions, first: int, sums: Array
    ) -> None:
        """Change row chosen[i] - first of `rows` and its state by its gradient sums[i], in optimizer step `step`."""
        rate, epsilon = self.learning_rate, self.dtype_of(EPSILON)
        if self.optimizer == "adagrad":
            adagrad(rows, state["squares"], chosen, first, sums, self.dtype_of(rate), epsilon)
            return
        rate *= math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
        keep = np.array(BETAS, self.dtype)
        adam(rows, state["means"], state["squares"], chosen, first, sums, self.dtype_of(rate), keep, epsilon)


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
    """Keys that each rank has asked of this one."""


class RowExchange(ABC):
    """Look-ups and updates over ranks; a subclass keeps this rank's rows. Every rank makes the same calls.

    A key is an id, mixed by a bijection; each rank owns the keys between two edges. `scale` is this rank's share of the
    global batch, by which gradients are multiplied before they are added.
    """

    def __init__(self, options: TableOptions, communicator: Communicator, edges: Positions, scale: float) -> None:
        """`edges` (num_ranks - 1,): the first key of each rank but the first."""
        self.options, self._comm, self._edges, self._scale = options, communicator, edges, scale
        self.step = 0
        """Optimizer steps done, skipped ones included."""
        self._open: dict[int, _LookUp] = {}
        self._count = 0
        self._sums: list[tuple[Positions, Array]] = []

    def dealt(self, keys: Positions, columns: dict[str, Array]) -> tuple[Positions, dict[str, Array]]:
        """Send keys (n,) and their numbers, columns of (n, ...), to the ranks that own the keys; returns what the ranks
        have sent here. A collective."""
        owners = np.searchsorted(self._edges, keys, side="right")
        order = np.argsort(owners, kind="stable")
        cuts = np.searchsorted(owners[order], np.arange(self._comm.num_ranks + 1)).tolist()

        def send(values: Array) -> Array:
            parts = [values[order[a:b]].reshape(-1) for a, b in itertools.pairwise(cuts)]
            return np.concatenate(self._comm.all_to_all_ragged(parts)).reshape(-1, *values.shape[1:])

        return send(keys), {name: send(values) for name, values in columns.items()}

    @abstractmethod
    def _keys_of(self, ids: Array) -> Positions:
        """The keys (n,) of ids (n,)."""

    @abstractmethod
    def _rows_at(self, keys: Positions) -> Array:
        """The rows (n, width) of keys (n,) that this rank owns."""

    @abstractmethod
    def _update(self, keys: Positions, sums: Array) -> None:
        """Apply the gradients (n, width) of distinct keys (n,) in the step that ends now."""

    def _ask(self, parts: list[Positions], times: list[Positions], *, keep: bool) -> list[Positions]:
        """Send `parts`, keys for each rank, that occur `times`; returns what each rank has asked of this one."""
        return self._comm.all_to_all_ragged(parts)

    def look_up(self, ids: Array, *, keep: bool) -> tuple[Array, int]:
        """The rows (*ids.shape, width) of `ids`, any shape, and a number for `take_gradient`. A collective.

        `keep`: whether this is a training step, whose gradient will be asked for. Raises DataError for an id outside of
        the table.
        """
        keys, places, times = np.unique(self._keys_of(ids.reshape(-1)), return_inverse=True, return_counts=True)
        cuts = list(itertools.pairwise([0, *np.searchsorted(keys, self._edges).tolist(), len(keys)]))
        asked = self._ask([keys[a:b] for a, b in cuts], [times[a:b] for a, b in cuts], keep=keep)
        width = self.options.width
        found = self._comm.all_to_all_ragged([self._rows_at(chosen).reshape(-1) for chosen in asked])
        distinct = found[0] if len(found) == 1 else np.concatenate(found)
        out = np.empty((ids.size, width), self.options.dtype)
        gather(distinct.reshape(-1, width), places, 0, out)
        self._count += 1
        if keep:
            counts = [part.size // width for part in found]
            self._open[self._count] = _LookUp(places, len(keys), counts, asked)
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
        """Apply the gradients of a step's look-ups at its end, unless the ranks have skipped it."""
        taken, self._sums = self._sums, []
        self._open.clear()
        self.step += 1
        if skipped or not taken:
            return
        chosen, sums = taken[0]
        if len(taken) > 1:
            chosen, sums = _added(*(np.concatenate(part) for part in zip(*taken, strict=True)))
        self._update(chosen, sums)


class ShardedTable(RowExchange):
    """A table with a row for each id from 0 to rows - 1. A key is the position in the whole table."""

    def __init__(self, options: TableOptions, communicator: Communicator, scale: float = 1.0) -> None:
        bounds = options.bounds(communicator.num_ranks)
        super().__init__(options, communicator, np.array([start for start, _ in bounds][1:], np.int64), scale)
        self.first, self.stop = bounds[communicator.rank]
        self.rows: Array = np.empty((self.stop - self.first, options.width), options.dtype)
        """(n, width): rows `first` to `stop` of the whole table, by position."""
        draw(self.rows, self.first, options.draw_key, options.spread)
        self.state: dict[str, Array] = {
            name: np.zeros((len(self.rows), *shape), options.dtype) for name, shape in options.state_shapes.items()
        }
        """The optimizer's state of the rows, such as Adagrad's accumulators `squares` (n,)."""
        self.touched = np.zeros(len(self.rows), np.bool_)
        """Whether a row has changed since the last whole checkpoint."""
        self.copy: LateCopy | None = None
        """The copy for a checkpoint that is being made."""

    def columns(self) -> dict[str, Array]:
        """What a whole checkpoint holds of this rank's rows, by name: views."""
        return {"rows": self.rows, **self.state}

    def changed_rows(self) -> dict[str, Array]:
        """What the difference to a whole checkpoint holds: positions (n,), and rows and state as `changed_...`."""
        chosen = np.flatnonzero(self.touched)
        found = {f"{CHANGED}_{name}": column[chosen] for name, column in self.columns().items()}
        return {CHANGED: chosen + self.first, **found}

    def load_changed(self, columns: dict[str, Array]) -> None:
        """Take this rank's rows from the differences that the ranks have read. A collective."""
        keys, dealt = self.dealt(columns[CHANGED], columns)
        for name, column in self.columns().items():
            column[keys - self.first] = dealt[f"{CHANGED}_{name}"]

    def _keys_of(self, ids: Array) -> Positions:
        return self.options.positions(ids)

    def _rows_at(self, keys: Positions) -> Array:
        out = np.empty((len(keys), self.options.width), self.options.dtype)
        gather(self.rows, keys, self.first, out)
        return out

    def _update(self, keys: Positions, sums: Array) -> None:
        places = keys - self.first
        self.touched[places] = True
        if self.copy is not None:
            self.copy.before(places)
            self.copy = None if self.copy.done else self.copy
        self.options.update(self.step, self.rows, self.state, keys, self.first, sums)


def _added(chosen: Positions, values: Array) -> tuple[Positions, Array]:
    """Each position once, rising, and the sum of its values (n, width) in their order."""
    positions, places = np.unique(chosen, return_inverse=True)
    sums = np.zeros((len(positions), values.shape[1]), values.dtype)
    add_by_place(values, places, values.dtype.type(1), sums)
    return positions, sums
