"""The order of a split's records in each epoch: all blocks by one keyed permutation, another one each epoch."""

from __future__ import annotations

from typing import Protocol

from training.plan.order import BlockTable, EpochOrder, Run
from training.plan.permutation import BlockPermutation, derive_key


class EveryOrder(Protocol):
    """Every epoch's order. Safe to ask from several threads."""

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch."""


class Orders:
    """Every epoch's order; the one last made and its neighbours are kept. Safe to ask from several threads."""

    def __init__(self, table: BlockTable, root: bytes, purpose: str = "blocks") -> None:
        self._table, self._root, self._purpose = table, root, purpose
        self._kept: dict[int, EpochOrder] = {}

    def order(self, epoch: int) -> EpochOrder:
        """One epoch's order."""
        order = self._kept.get(epoch)
        if order is None:
            key = derive_key(self._root, self._purpose, epoch)
            order = EpochOrder(self._table, BlockPermutation(key, self._table.num_blocks))
            # Lanes are at most one sample apart, so two neighbours are in use at a time; others only cost memory.
            for old in list(self._kept):
                if abs(old - epoch) > 1:
                    self._kept.pop(old, None)
            self._kept[epoch] = order
        return order

    def runs(self, epoch: int, start: int, stop: int) -> list[Run]:
        """The records at positions start..stop-1 of an epoch."""
        return self.order(epoch).runs(start, stop)
