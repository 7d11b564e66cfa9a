"""A lane that reads in several places of its span at once, for data that lie sorted: each window holds some of each.

A span of n positions is B parts, which are read in turn, P = W / B records at a time (at least one):

    part 0 [a a a|b b b|c c]  part 1 [d d d|e e e|f f]    B = 2, P = 3, n = 16
    order  a a a d d d b b b e e e c c f f                the rest, of less than B * P, is shared out

So B blocks are under way in a lane, and a window of W has a part of each. Offsets are found by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.plan.order import Run
from training.plan.orders import EveryOrder


@dataclass(frozen=True, slots=True)
class Interleaving:
    """Of a span of `size` positions in `parts` parts, `piece` records at a time."""

    size: int
    parts: int
    piece: int

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Positions (first, last + 1) within the span, one after another those of offsets start..stop-1."""
        turn = self.parts * self.piece
        turns, rest = divmod(self.size, turn)
        while start < stop:
            number, within = divmod(start, turn)
            if number < turns:
                part, skip = divmod(within, self.piece)
                place, length = number * self.piece + skip, self.piece - skip
            else:
                part = ((within + 1) * self.parts - 1) // rest  # the last one with rest * part // parts <= within
                begins, ends = (rest * edge // self.parts for edge in (part, part + 1))
                place, length = turns * self.piece + within - begins, ends - within
            first = part * turns * self.piece + rest * part // self.parts + place
            length = min(length, stop - start)
            yield first, first + length
            start += length


class InterleavedLanes:
    """Every epoch's order: in each lane's span that of `orders`, interleaved. `span(epoch, lane)` are its ends."""

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
        """The ends of the lane that holds a position: spans are even but for one sample."""
        total = self._span(epoch, self._lanes - 1)[1]
        lane = min(self._lanes - 1, position * self._lanes // total)
        while self._span(epoch, lane)[0] > position:
            lane -= 1
        while self._span(epoch, lane)[1] <= position:
            lane += 1
        return self._span(epoch, lane)
