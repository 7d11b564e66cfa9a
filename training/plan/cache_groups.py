"""Cache groups: blocks that the same lanes read in every epoch, so that a node's cache serves later epochs.

One keyed permutation lays all blocks end to end, for K epochs or for all; call a place in it a base position. The L
lanes are C runs of L / C neighbours, and group c of an epoch is the base positions

    floor(b*l/L) - floor(a*l/L)  for l = c*L/C  up to the same for l = (c+1)*L/C,  a = epoch * T, b = a + T

which is what its lanes are due in that epoch, sample for sample. So each group holds its share whatever T, C and the
lengths of blocks are, and all that the plan says of lanes stays true. As floor(x + y) - floor(x) is floor(y) or one
more, an end of a group moves by at most one sample from epoch to epoch: a group's blocks are the same ones in all
epochs, but that a block at an end may come or go for the sake of one sample. It is read by the lanes of both sides,
each its own records. An epoch permutes the blocks within each group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from lockstep.storage.errors import ConfigError
from training.plan.lane_count import largest_divisor
from training.plan.order import BlockTable, GroupOrder, Run
from training.plan.orders import Orders
from training.plan.permutation import derive_key

_MOST_LANES = 4096  # that are looked at for an advice


def check_cache_groups(global_batch: int, lanes: int, groups: int | None, rotation: int | None) -> None:
    """Raise ConfigError where C does not divide L, or K is without C or not from 1 up."""
    if groups is None and rotation is not None:
        raise _refuse("a rotation without groups", f"--cache-groups with --cache-rotation {rotation}")
    if groups is not None and (groups < 1 or lanes % groups):
        units = max(1, groups)
        first = -(-lanes // units) * units
        near = range(first, min(global_batch, _MOST_LANES) + 1, units)
        more = next((f"{number}" for number in near if global_batch % number == 0), None)
        more = more or f"{first} with a --global-batch that is a multiple of {first}"
        hint = f"--cache-groups {largest_divisor(lanes, units)} or --lanes {more}"
        raise _refuse(f"{groups} cache groups of {lanes} lanes", hint)
    if rotation is not None and not 1 <= rotation < 1 << 63:
        raise _refuse(f"a rotation every {rotation} epochs", "--cache-rotation 1 or more, below 2^63, or none")


class CacheGroups:
    """Every epoch's order, group after group. `starts(epoch)` are the groups' first positions and T.

    Safe to ask from several threads.
    """

    def __init__(
        self, table: BlockTable, root: bytes, starts: Callable[[int], list[int]], rotation: int | None
    ) -> None:
        self._base = Orders(table, root, "cache groups")
        self._root, self._starts, self._rotation = root, starts, rotation
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
            base = self._base.order(epoch // self._rotation if self._rotation else 0)
            order = GroupOrder(base, start, stop, derive_key(self._root, "group's blocks", epoch, group))
            for old in list(self._kept):
                if abs(old[0] - epoch) > 1:  # lanes are at most one sample apart: never two epochs
                    self._kept.pop(old, None)
            self._kept[epoch, group] = order
        return order


def _refuse(got: str, hint: str) -> ConfigError:
    return ConfigError(
        "cache groups and lanes do not fit together",
        got=got,
        allowed="cache groups that divide the lanes, made anew every 1 or more epochs",
        next_step=f"Use {hint}.",
    )
