"""One epoch's order of blocks: from a position 0..T-1 to a record of a shard, by arithmetic.

All blocks hold `block_records` records except the last of each shard. So the place of a position would be a division,
were it not for the short blocks before it: at most one a shard, which is why memory is O(shards), never O(blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.permute import BlockPermutation

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive records of one shard within one block, from `first_record` (both counted in records)."""

    shard: int
    first_record: int
    count: int


class BlockTable:
    """The blocks of a split, numbered shard after shard; the same for every epoch."""

    def __init__(self, shard_records: tuple[int, ...], block_records: int) -> None:
        self.block_records = block_records
        self.shard_records = np.asarray(shard_records, dtype=np.int64)
        blocks = -(-self.shard_records // block_records)
        # (shards + 1,) int64: first_block[s] is the number of shard s's first block, the last entry the count of all.
        self.first_block = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self.num_blocks = int(self.first_block[-1])
        short_shards = np.flatnonzero(self.shard_records % block_records)
        self.short_blocks: I64 = self.first_block[short_shards + 1] - 1
        self.short_by: I64 = block_records - self.shard_records[short_shards] % block_records

    def locate(self, blocks: I64) -> tuple[I64, I64]:
        """Shard and first record of each block: (n,) int64 -> two (n,) int64."""
        shards = np.searchsorted(self.first_block, blocks, side="right") - 1
        return shards, (blocks - self.first_block[shards]) * self.block_records

    def sizes(self, blocks: I64) -> I64:
        """Records in each block: (n,) int64 -> (n,) int64."""
        shards, first = self.locate(blocks)
        return np.minimum(self.block_records, self.shard_records[shards] - first)

    def run(self, block: int) -> Run:
        """The whole of one block."""
        numbers = np.asarray([block], dtype=np.int64)
        shard, first = self.locate(numbers)
        return Run(int(shard[0]), int(first[0]), int(self.sizes(numbers)[0]))


class EpochOrder:
    """The blocks of a split laid end to end in the order of one epoch's permutation."""

    def __init__(self, table: BlockTable, permutation: BlockPermutation) -> None:
        self._table, self._permutation = table, permutation
        places = permutation.inverse(table.short_blocks)
        order = np.argsort(places)
        self._short_places: I64 = places[order]
        # (short + 1,) int64: how many records are missing before the i-th short block.
        self._missing = np.concatenate([[0], np.cumsum(table.short_by[order])]).astype(np.int64)
        self._short_stops: I64 = (self._short_places + 1) * table.block_records - self._missing[1:]

    def place_of(self, position: int) -> int:
        """Which block of the order (0 = the first) holds this position."""
        before = int(np.searchsorted(self._short_stops, position, side="right"))
        return (position + int(self._missing[before])) // self._table.block_records

    def start_of(self, places: I64) -> I64:
        """First position of the blocks at these places: (n,) int64 -> (n,) int64."""
        before = np.searchsorted(self._short_places, places, side="left")
        return places * self._table.block_records - self._missing[before]

    def runs(self, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1, in order, one run a block."""
        if start >= stop:
            return []
        places = np.arange(self.place_of(start), self.place_of(stop - 1) + 1, dtype=np.int64)
        blocks = self._permutation.forward(places)
        shards, first_records = self._table.locate(blocks)
        starts = self.start_of(places)
        stops = np.minimum(starts + self._table.sizes(blocks), stop)
        cut = np.maximum(start - starts, 0)
        counts = stops - starts - cut
        return [
            Run(int(shard), int(first), int(count))
            for shard, first, count in zip(shards, first_records + cut, counts, strict=True)
        ]
