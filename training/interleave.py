"""A lane that reads in several places of its span at once, for data that lie sorted: each window holds some of each.

A span of n positions is B parts, which are read in turn, P = W / B records at a time (at least one):

    part 0 [a a a|b b b|c c]  part 1 [d d d|e e e|f f]    B = 2, P = 3, n = 16
    order  a a a d d d b b b e e e c c f f                the rest, of less than B * P, is shared out

So B blocks are under way in a lane, and a window of W has a part of each. Offsets are found by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
