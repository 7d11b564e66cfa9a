"""A table in shards for any int64 ids: rows are admitted and evicted as ids are seen. No TensorFlow.

Ids are mixed by SplitMix64's finaliser, a bijection of 64 bits; the first 8 bits of a key are its virtual shard, its
last bits the first slot of a hash table by linear probing. An id that has no row reads zeros and learns nothing. It
waits, counted, until it was seen `admit_after` times in training; its row exists from the end of that step on, with
first values by seed, table and id. At the end of each step that is a multiple of `evict_after_steps`, rows and waiting
ids that were not seen in the last `evict_after_steps` steps are removed. Both depend on global batches only, so any
number of ranks has the same rows. After DeepRec's EmbeddingVariable (feature filter and eviction).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from lockstep.storage.errors import LockstepError
from lockstep.training.comm.base import Communicator
from lockstep.training.embeddings.sharded_table import SHARDS, Positions, RowExchange, TableOptions
from lockstep.training.embeddings.table_kernels import draw_each, find, gather, insert

Array = NDArray[Any]
FIRST_ROWS = 1024
SHARD_BITS = 8
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def mixed(ids: Array) -> Positions:
    """The keys of `ids` (n,): int64, a bijection."""
    z = ids.astype(np.int64, copy=False).view(np.uint64) * np.uint64(_ODD[0])
    for shift, odd in zip(_SHIFTS, (_ODD[1], _ODD[2], 1), strict=True):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(odd)
    return z.view(np.int64)


def unmixed(keys: Positions) -> Positions:
    """The ids of `keys` (n,): the inverse of `mixed`."""
    z = keys.view(np.uint64)
    for shift, odd in zip(reversed(_SHIFTS), (_ODD[2], _ODD[1], _ODD[0]), strict=True):
        z = z ^ (z >> np.uint64(shift)) ^ (z >> np.uint64(2 * shift))
        z = z * np.uint64(pow(odd, -1, 1 << 64))
    return z.view(np.int64)


def shard_of(keys: Positions) -> Positions:
    """The virtual shard of each key, in the order of keys."""
    return (keys >> (64 - SHARD_BITS)) + SHARDS // 2


class Entries:
    """Distinct keys, each with numbers in some columns. Place 0 belongs to keys that are not here: zeros."""

    def __init__(self, name: str, columns: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """`columns`: name -> shape and dtype of a key's numbers."""
        self._name, self.count = name, 1
        self.keys: Positions = np.zeros(FIRST_ROWS, np.int64)
        self.columns: dict[str, Array] = {
            column: np.zeros((FIRST_ROWS, *shape), dtype) for column, (shape, dtype) in columns.items()
        }
        self._slots = np.zeros(2 * FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        return self.count - 1

    @property
    def each_bytes(self) -> int:
        """Bytes of a key with its numbers and its share of the hash table, which is a quarter to half full."""
        return 5 * 8 + sum(column[:1].nbytes for column in self.columns.values())

    def find(self, keys: Positions) -> Positions:
        """The place of each key (n,); 0 if it is not here."""
        out = np.empty(len(keys), np.int64)
        find(self._slots, self.keys, keys, out)
        return out

    def add(self, keys: Positions) -> slice:
        """The places of new, distinct keys, whose numbers are not set. Raises LockstepError if memory does not do."""
        start, stop = self.count, self.count + len(keys)
        if stop > len(self.keys):
            self._grow(1 << (stop - 1).bit_length())
        self.keys[start:stop] = keys
        insert(self._slots, self.keys, start, stop)
        self.count = stop
        return slice(start, stop)

    def remove(self, gone: Array) -> None:
        """Remove places where `gone` (count,) is true; 0 must stay."""
        if not gone.any():
            return
        stay = np.flatnonzero(~gone)
        for column in (self.keys, *self.columns.values()):
            column[: len(stay)] = column[stay]
        self.count = len(stay)
        self._slots[:] = 0
        insert(self._slots, self.keys, 1, self.count)

    def part(self, column: str) -> Array:
        """The numbers (len(self), ...) of all keys: a view."""
        return self.columns[column][1 : self.count]

    def _grow(self, size: int) -> None:
        needed, free = self.count * self.each_bytes, psutil.virtual_memory().available
        if needed > free:
            raise LockstepError(
                f"the table {self._name} does not fit into the memory of this host",
                got=f"{len(self)} ids of this rank, {self.each_bytes} bytes each, to be copied while it grows",
                allowed=f"{free >> 20} MiB, the free memory of this host",
                next_step="Raise the layer's admit_after, lower evict_after_steps, or resume with more ranks.",
            )
        self.keys = _larger(self.keys, self.count, size)
        for name, column in self.columns.items():
            self.columns[name] = _larger(column, self.count, size)
        self._slots = np.zeros(2 * size, np.int64)
        insert(self._slots, self.keys, 1, self.count)


def _larger(column: Array, count: int, size: int) -> Array:
    found = np.empty((size, *column.shape[1:]), column.dtype)  # what is not used takes no memory
    found[:count] = column[:count]
    return found


def _unseen(entries: Entries, last: int) -> NDArray[np.bool_]:
    """Return (count,): whether a key was last seen in step `last` or before."""
    found: NDArray[np.bool_] = entries.columns["seen"][: entries.count] <= last
    found[0] = False
    return found


class GrowingTable(RowExchange):
    """This rank's rows of a table without a number of rows."""

    def __init__(self, options: TableOptions, communicator: Communicator, scale: float = 1.0) -> None:
        shards = options.shards_of(communicator.num_ranks)
        edges = np.array([start - SHARDS // 2 for start, _ in shards][1:], np.int64) << (64 - SHARD_BITS)
        super().__init__(options, communicator, edges, scale)
        self.first_shard, stop = shards[communicator.rank]
        self.totals = np.zeros((stop - self.first_shard, 3), np.int64)
        """Rows admitted and evicted since the run began, in each of this rank's virtual shards, and the step up to
        which ids that were not seen later are removed."""
        state = {name: (shape, options.dtype) for name, shape in options.state_shapes.items()}
        number, numbers = ((), "int64"), ((options.width,), options.dtype)
        self.rows = Entries(options.name, {"seen": number, "rows": numbers, **state})
        """`seen` is the last step whose batch had the id."""
        self.waiting = Entries(options.name, {"times": number, "seen": number})
        """Ids without a row, and how often they were seen; `seen` is 0 for an id that has a row by now."""
        self._seen: list[tuple[Positions, Positions]] = []

    def describe(self) -> str:
        """What the table takes of memory, in words."""
        row, waits, free = self.rows.each_bytes, self.waiting.each_bytes, psutil.virtual_memory().available
        return (
            f"table {self.options.name}: {row} bytes a row, {waits} bytes an id that waits for its row; "
            f"{free >> 20} MiB free on this host hold at most {free // row} rows, half while the table grows"
        )

    def commit(self, *, skipped: bool) -> None:
        """Commit the step as every table does; then admit ids that were seen often enough, and evict rows that were not
        seen.
        """
        super().commit(skipped=skipped)
        seen, self._seen = self._seen, []
        if seen and not skipped:
            keys, places = np.unique(np.concatenate([keys for keys, _ in seen]), return_inverse=True)
            times = np.zeros(len(keys), np.int64)
            np.add.at(times, places, np.concatenate([times for _, times in seen]))
            self._note(keys, times)
        every = self.options.evict_after_steps
        if every is not None and self.step % every == 0:
            self._evict(self.step - every)

    def figures(self) -> NDArray[np.int64]:
        """Return this rank's (5,): rows, waiting ids, admitted, evicted, bytes."""
        used = len(self.rows) * self.rows.each_bytes + len(self.waiting) * self.waiting.each_bytes
        return np.array([len(self.rows), self._waits().sum(), *self.totals[:, :2].sum(0), used])

    def columns(self, since: int = 0) -> dict[str, Array]:
        """What a checkpoint holds of this rank's ids that were seen after step `since`, by name; `waiting_...` are of
        ids without a row. Views, where they can be."""
        seen: Any = self.rows.part("seen") > since if since else slice(None)
        waits = self.waiting.part("seen") > since
        return {
            "ids": unmixed(self.rows.keys[1 : self.rows.count][seen]),
            **{name: self.rows.part(name)[seen] for name in self.rows.columns},
            "waiting_ids": unmixed(self.waiting.keys[1 : self.waiting.count][waits]),
            **{f"waiting_{name}": self.waiting.part(name)[waits] for name in self.waiting.columns},
        }

    def load(self, columns: Mapping[str, Array], *, whole: bool = True) -> None:
        """Take this rank's ids from the `columns` that the ranks have read. A collective.

        Without `whole` they are the ids seen since a checkpoint that is loaded, and `totals` are those of their step.
        """
        for prefix, entries in (("", self.rows), ("waiting_", self.waiting)):
            if whole:
                entries.remove(np.arange(entries.count) > 0)
            named = {name: columns[prefix + name] for name in entries.columns}
            keys, dealt = self.dealt(mixed(columns[f"{prefix}ids"]), named)
            entries.add(keys[entries.find(keys) == 0])
            places = entries.find(keys)
            for name, column in entries.columns.items():
                column[places] = dealt[name]
        if not whole:
            for entries in (self.rows, self.waiting):
                entries.remove(_unseen(entries, int(self.totals[0, 2])))
            has_row = self.rows.find(self.waiting.keys[: self.waiting.count]) > 0
            has_row[0] = False
            self.waiting.remove(has_row)

    def _keys_of(self, ids: Array) -> Positions:
        return mixed(ids)

    def _ask(self, parts: list[Positions], times: list[Positions], *, keep: bool) -> list[Positions]:
        if not keep:
            return self._comm.all_to_all_ragged(parts)
        both = [np.concatenate(part) for part in zip(parts, times, strict=True)]
        found = [np.split(part, 2) for part in self._comm.all_to_all_ragged(both)]
        self._seen += [(keys, times) for keys, times in found]
        return [keys for keys, _ in found]

    def _rows_at(self, keys: Positions) -> Array:
        out = np.empty((len(keys), self.options.width), self.options.dtype)
        gather(self.rows.columns["rows"], self.rows.find(keys), 0, out)
        return out

    def _update(self, keys: Positions, sums: Array) -> None:
        places = self.rows.find(keys)
        here, columns = places > 0, self.rows.columns
        self.options.update(self.step, columns["rows"], columns, places[here], 0, sums[here])

    def _waits(self) -> NDArray[np.bool_]:
        return self.waiting.part("seen") > 0

    def _note(self, keys: Positions, times: Positions) -> None:
        """Distinct keys were seen so many times in this step."""
        places = self.rows.find(keys)
        self.rows.columns["seen"][places] = np.where(places > 0, self.step, 0)
        keys, times = keys[places == 0], times[places == 0]
        places = self.waiting.find(keys)
        times = times + self.waiting.columns["times"][places]
        ready = times >= self.options.admit_after
        self._admit(keys[ready])
        counts, seen = self.waiting.columns["times"], self.waiting.columns["seen"]
        counts[places[ready]] = seen[places[ready]] = 0
        old = ~ready & (places > 0)
        counts[places[old]], seen[places[old]] = times[old], self.step
        fresh = ~ready & (places == 0)
        if self.waiting.count + fresh.sum() > len(self.waiting.keys):  # before it grows
            self.waiting.remove(np.concatenate([[False], ~self._waits()]))
        places_of_new = self.waiting.add(keys[fresh])
        self.waiting.columns["times"][places_of_new] = times[fresh]
        self.waiting.columns["seen"][places_of_new] = self.step

    def _admit(self, keys: Positions) -> None:
        places, columns = self.rows.add(keys), self.rows.columns
        draw_each(columns["rows"][places], keys, self.options.draw_key, self.options.spread)
        for name in self.options.state_shapes:
            columns[name][places] = 0
        columns["seen"][places] = self.step
        self._total(0, keys)

    def _evict(self, last: int) -> None:
        """Remove rows and waiting ids that were last seen in step `last` or before."""
        gone = _unseen(self.rows, last)
        self._total(1, self.rows.keys[: self.rows.count][gone])
        self.rows.remove(gone)
        self.waiting.remove(_unseen(self.waiting, last))
        self.totals[:, 2] = last

    def _total(self, which: int, keys: Positions) -> None:
        self.totals[:, which] += np.bincount(shard_of(keys) - self.first_shard, minlength=len(self.totals))
