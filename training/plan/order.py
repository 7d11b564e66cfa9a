"""The order of records in an epoch: which record of which shard is at a position 0..T-1, by arithmetic. Decision 020.

lockstep.training.plan.permutation shuffles the blocks.

All blocks have `block_records` records except the last of each shard. A position is mapped by a division, corrected for
the short blocks before it; these are at most one a shard, so memory is O(shards), not O(blocks).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.storage.errors import ConfigError
from lockstep.training.plan.lane_count import largest_divisor
from lockstep.training.plan.permutation import BlockPermutation, derive_key

I64 = npt.NDArray[np.int64]
_MOST_LANES = 4096  # tried to find a number to suggest


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive records of one shard within one block, from `first_record` (both counted in records)."""

    shard: int
    first_record: int
    count: int


class BlockTable:
    """The blocks of a split, numbered shard after shard; the same for every epoch.

    `kept` are the records that a condition keeps in each block, for a split of which only these are read
    (lockstep.training.plan.selection); None is all. A block of which none is kept is not in the table. The kept records
    of a block count from its first record on, without gaps. Memory: O(shards); with `kept` O(blocks).
    """

    def __init__(self, shard_records: tuple[int, ...], block_records: int, kept: Sequence[int] | None = None) -> None:
        self.block_records = block_records
        self.shard_records = np.asarray(shard_records, dtype=np.int64)
        blocks = -(-self.shard_records // block_records)
        # (shards + 1,) int64: the number of each shard's first block in the files, and the number of all blocks.
        self._first_stored = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        short_shards = np.flatnonzero(self.shard_records % block_records)
        self.short_blocks: I64 = self._first_stored[short_shards + 1] - 1
        self.short_by: I64 = block_records - self.shard_records[short_shards] % block_records
        self.num_blocks = int(self._first_stored[-1])
        self.records = int(self.shard_records.sum())
        self._stored: I64 | None = None  # (blocks,) int64: which block of the files each block of the table is
        self._sizes: I64 | None = None
        if kept is not None:
            found = np.asarray(kept, dtype=np.int64)
            self._stored = np.flatnonzero(found)
            self._sizes = found[self._stored]
            self.num_blocks, self.records = len(self._stored), int(found.sum())
            self.short_blocks = np.flatnonzero(self._sizes < block_records)
            self.short_by = block_records - self._sizes[self.short_blocks]

    def locate(self, blocks: I64) -> tuple[I64, I64]:
        """Shard and first record of each block: (n,) int64 -> two (n,) int64."""
        stored = blocks if self._stored is None else self._stored[blocks]
        shards = np.searchsorted(self._first_stored, stored, side="right") - 1
        return shards, (stored - self._first_stored[shards]) * self.block_records

    def sizes(self, blocks: I64) -> I64:
        """Records in each block: (n,) int64 -> (n,) int64."""
        if self._sizes is not None:
            return self._sizes[blocks]
        shards, first = self.locate(blocks)
        return np.minimum(self.block_records, self.shard_records[shards] - first)

    def number(self, run: Run) -> int:
        """Return how many records come before a run in file order."""
        stored = int(self._first_stored[run.shard]) + run.first_record // self.block_records
        block = stored if self._stored is None else int(np.searchsorted(self._stored, stored))
        before = block * self.block_records - int(self.short_by[: np.searchsorted(self.short_blocks, block)].sum())
        return before + run.first_record % self.block_records

    def runs(self, blocks: I64, cut: I64, counts: I64) -> list[Run]:
        """Make a run of `counts` records of each block after its first `cut`: three (n,) int64."""
        shards, first_records = self.locate(blocks)
        columns = (shards.tolist(), (first_records + cut).tolist(), counts.tolist())
        return [Run(shard, first, count) for shard, first, count in zip(*columns, strict=True)]

    def rows(self, start: int, stop: int) -> list[Run]:
        """The records start..stop-1 of the split, in file order, one run a block."""
        if start >= stop:
            return []
        return self.runs(*Line(self.block_records, self.short_blocks, self.short_by).cut(start, stop))

    def run(self, block: int) -> Run:
        """Return the run of a whole block."""
        numbers = np.asarray([block], dtype=np.int64)
        shard, first = self.locate(numbers)
        return Run(int(shard[0]), int(first[0]), int(self.sizes(numbers)[0]))


class Line:
    """Pieces end to end, of `full` records each; those at the places `short` have `lacks` records less."""

    def __init__(self, full: int, short: I64, lacks: I64) -> None:
        self._full = full
        order = np.argsort(short)
        self.short: I64 = short[order]
        self.lacks: I64 = lacks[order]
        # (short + 1,) int64: the records missing before the i-th short piece.
        self._missing = np.concatenate([[0], np.cumsum(self.lacks)]).astype(np.int64)
        self._short_stops: I64 = (self.short + 1) * full - self._missing[1:]

    def place_of(self, position: int) -> int:
        """The piece (0 = the first) that holds this position."""
        before = int(np.searchsorted(self._short_stops, position, side="right"))
        return (position + int(self._missing[before])) // self._full

    def starts(self, places: I64) -> I64:
        """First position of the pieces at these places, and of one past the last: (n,) int64 -> (n,) int64."""
        before = np.searchsorted(self.short, places, side="left")
        return places * self._full - self._missing[before]

    def cut(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """The pieces of positions start..stop-1 (start < stop): places, records skipped, records: three (n,) int64."""
        places = np.arange(self.place_of(start), self.place_of(stop - 1) + 2, dtype=np.int64)
        starts = self.starts(places)
        cut = np.maximum(start - starts[:-1], 0)
        return places[:-1], cut, np.minimum(starts[1:], stop) - starts[:-1] - cut


class EpochOrder:
    """The blocks of a split, end to end, in the order of a permutation."""

    def __init__(self, table: BlockTable, permutation: BlockPermutation) -> None:
        self.table, self._permutation = table, permutation
        self.line = Line(table.block_records, permutation.inverse(table.short_blocks), table.short_by)

    def blocks(self, places: I64) -> I64:
        """The blocks at these places: (n,) int64 -> (n,) int64."""
        return self._permutation.forward(places)

    def runs(self, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1, in order, one run a block."""
        if start >= stop:
            return []
        places, cut, counts = self.line.cut(start, stop)
        return self.table.runs(self.blocks(places), cut, counts)


class GroupOrder:
    """The records at positions start..stop-1 (start < stop) of an order, with their blocks reordered by `key`.

    If an end cuts a block, this group has only the block's records on its side.
    """

    def __init__(self, base: EpochOrder, start: int, stop: int, key: bytes) -> None:
        self._base, line = base, base.line
        self._first = line.place_of(start)
        last = line.place_of(stop - 1)
        first_start, last_stop = (int(n) for n in line.starts(np.asarray([self._first, last + 1], dtype=np.int64)))
        self._head = start - first_start
        self._permutation = BlockPermutation(key, last + 1 - self._first)
        # Pieces by their number in the group. The end pieces lack what is cut off, and what their blocks lack
        # themselves.
        inside = slice(*np.searchsorted(line.short, [self._first, last + 1]).tolist())
        short, numbers = np.unique(
            np.concatenate([line.short[inside] - self._first, [0, last - self._first]]), return_inverse=True
        )
        lacks = np.zeros(len(short), dtype=np.int64)
        np.add.at(lacks, numbers, np.concatenate([line.lacks[inside], [self._head, last_stop - stop]]))
        self._line = Line(base.table.block_records, self._permutation.inverse(short), lacks)

    def runs(self, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of the group's own order, one run a block."""
        if start >= stop:
            return []
        places, cut, counts = self._line.cut(start, stop)
        pieces = self._permutation.forward(places)
        head = np.where(pieces == 0, self._head, 0)
        return self._base.table.runs(self._base.blocks(self._first + pieces), head + cut, counts)


class EveryOrder(Protocol):
    """The order of every epoch. Thread-safe."""

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch."""


class Orders:
    """The order of every epoch. Thread-safe; keeps the order made last and its neighbours."""

    def __init__(self, table: BlockTable, root: bytes) -> None:
        self._table, self._root = table, root
        self._kept: dict[int, EpochOrder] = {}

    def order(self, epoch: int) -> EpochOrder:
        """One epoch's order."""
        order = self._kept.get(epoch)
        if order is None:
            key = derive_key(self._root, "blocks", epoch)
            order = EpochOrder(self._table, BlockPermutation(key, self._table.num_blocks))
            # Lanes are at most one sample apart, so at most two neighbouring epochs are in use.
            for old in list(self._kept):
                if abs(old - epoch) > 1:
                    self._kept.pop(old, None)
            self._kept[epoch] = order
        return order

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch."""
        return self.order(epoch).runs(start, stop)


def check_cache_groups(global_batch: int, lanes: int, groups: int | None) -> None:
    """Raise ConfigError if C does not divide L."""
    if groups is not None and (groups < 1 or lanes % groups):
        least = max(1, groups)
        first = -(-lanes // least) * least
        near = range(first, min(global_batch, _MOST_LANES) + 1, least)
        more = next((f"{number}" for number in near if global_batch % number == 0), None)
        more = more or f"{first} with a --global-batch that is a multiple of {first}"
        raise ConfigError(
            "cache groups and lanes do not fit together",
            got=f"{groups} cache groups of {lanes} lanes",
            allowed="cache groups that divide the lanes",
            next_step=f"Use --cache-groups {largest_divisor(lanes, least)} or --lanes {more}.",
        )


class CacheGroups:
    """The order of every epoch, group after group. `starts(epoch)`: the groups' first positions and T. Thread-safe."""

    def __init__(self, table: BlockTable, root: bytes, starts: Callable[[int], list[int]]) -> None:
        # One order deals the blocks to the groups in all epochs, so that a group keeps its blocks.
        self._base = EpochOrder(table, BlockPermutation(derive_key(root, "cache groups", 0), table.num_blocks))
        self._root, self._starts = root, starts
        self._kept: dict[tuple[int, int], GroupOrder] = {}

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch."""
        starts, found = self._starts(epoch), []
        while start < stop:
            group = bisect_right(starts, start) - 1
            first, end = starts[group], min(stop, starts[group + 1])
            found += self._order(epoch, group, first, starts[group + 1]).runs(start - first, end - first)
            start = end
        return found

    def _order(self, epoch: int, group: int, start: int, stop: int) -> GroupOrder:
        order = self._kept.get((epoch, group))
        if order is None:
            order = GroupOrder(self._base, start, stop, derive_key(self._root, "group's blocks", epoch, group))
            for old in list(self._kept):
                if abs(old[0] - epoch) > 1:  # lanes are at most one sample apart, never two epochs
                    self._kept.pop(old, None)
            self._kept[epoch, group] = order
        return order


@dataclass(frozen=True, slots=True)
class Interleaving:
    """The order in which a lane reads a span of `size` positions: from `parts` parts in turn, `piece` records each."""

    size: int
    parts: int
    piece: int

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges (first, last + 1) of positions within the span that offsets start..stop-1 read, in order."""
        turn = self.parts * self.piece
        turns, rest = divmod(self.size, turn)
        while start < stop:
            number, within = divmod(start, turn)
            if number < turns:
                part, skip = divmod(within, self.piece)
                offset, length = number * self.piece + skip, self.piece - skip
            else:
                part = ((within + 1) * self.parts - 1) // rest  # the last one with rest * part // parts <= within
                begins, ends = (rest * edge // self.parts for edge in (part, part + 1))
                offset, length = turns * self.piece + within - begins, ends - within
            first = part * turns * self.piece + rest * part // self.parts + offset
            length = min(length, stop - start)
            yield first, first + length
            start += length


class InterleavedLanes:
    """The order of every epoch: that of `orders`, interleaved within each lane's `span(epoch, lane)`."""

    def __init__(
        self, orders: EveryOrder, span: Callable[[int, int], tuple[int, int]], lanes: int, parts: int, piece: int
    ) -> None:
        self._orders, self._span, self._lanes, self._parts, self._piece = orders, span, lanes, parts, piece

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch, one run a piece."""
        found: list[Run] = []
        while start < stop:
            begin, end = self._span_of(epoch, start)
            pieces = Interleaving(end - begin, self._parts, self._piece).pieces(start - begin, min(stop, end) - begin)
            for first, last in pieces:
                found += self._orders.runs(epoch, begin + first, begin + last)
            start = end
        return found

    def _span_of(self, epoch: int, position: int) -> tuple[int, int]:
        """The span that holds a position; spans differ by at most one sample."""
        total = self._span(epoch, self._lanes - 1)[1]
        lane = min(self._lanes - 1, position * self._lanes // total)
        while self._span(epoch, lane)[0] > position:
            lane -= 1
        while self._span(epoch, lane)[1] <= position:
            lane += 1
        return self._span(epoch, lane)
