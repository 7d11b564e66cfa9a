"""The program of one rank in a collective: the frames it sends and receives, over the cells of its buffer.

The buffer is cut into parts (one per rank) and these into cells; an algorithm is a pure function that lists, in one
order that all ranks share, which runs of cells are sent as one frame. The dependencies follow from the cells: a frame
leaves when all earlier frames into its cells have arrived, and frames into the same cells are taken in the order of the
program. Frames between two ranks keep the order of the program on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from lockstep.training.comm.base import part_bounds

CHUNK_BYTES = 512 << 10  # stays in the caches between receiving, checking and adding; benchmarks/all_reduce.py chose it

Combine = Literal["copy", "own_first", "own_last"]
"""How a frame is used: it replaces the cells, or is combined with them as op(own, frame) or op(frame, own)."""


class Grid(NamedTuple):
    """A buffer's cells."""

    edges: tuple[int, ...]
    """Cell c is the elements from edges[c] to edges[c + 1]."""
    parts: tuple[int, ...]
    """Part p is the cells from parts[p] to parts[p + 1]; an empty part has none."""
    cells_per_frame: int
    """The most neighbouring cells in one frame."""


class Send(NamedTuple):
    """A frame to `peer`, of the elements from start to stop, once the receives with the numbers in `after` are done."""

    peer: int
    start: int
    stop: int
    after: tuple[int, ...]


class Receive(NamedTuple):
    """A frame from `peer` for the elements from start to stop; begun once the receives in `after` are done."""

    number: int
    peer: int
    start: int
    stop: int
    combine: Combine
    after: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The frames of one rank, in order."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]
    keeps_sent: bool = False
    """Cells may be overwritten while a frame of them is being sent: each frame is copied when it becomes ready."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The other ranks in it, ascending."""
        return tuple(sorted({send.peer for send in self.sends} | {receive.peer for receive in self.receives}))

    @cached_property
    def by_peer(self) -> tuple[tuple[int, tuple[Send, ...], tuple[Receive, ...]], ...]:
        """(peer, frames to it, frames from it) for each of `peers`."""
        return tuple(
            (
                peer,
                tuple(send for send in self.sends if send.peer == peer),
                tuple(receive for receive in self.receives if receive.peer == peer),
            )
            for peer in self.peers
        )


class Builder:
    """Collects the frames of one rank, in the program's order."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sends: list[Send] = []
        self._receives: list[Receive] = []
        self._writer: list[int | None] = [None] * (len(grid.edges) - 1)

    def send(self, peer: int, first: int, last: int) -> None:
        """Cells first to last (excluded) go to `peer`, in frames of the grid's size."""
        for start, stop in self._frames(first, last):
            edges = self._grid.edges
            self._sends.append(Send(peer, edges[start], edges[stop], self._writers(start, stop)))

    def receive(self, peer: int, first: int, last: int, combine: Combine) -> None:
        """Receive cells first..last - 1 from `peer`."""
        for start, stop in self._frames(first, last):
            number = len(self._receives)
            edges = self._grid.edges
            after = self._writers(start, stop)
            self._receives.append(Receive(number, peer, edges[start], edges[stop], combine, after))
            self._writer[start:stop] = [number] * (stop - start)

    def program(self, *, keeps_sent: bool = False) -> Program:
        """The collected frames."""
        return Program(tuple(self._sends), tuple(self._receives), keeps_sent)

    def _frames(self, first: int, last: int) -> list[tuple[int, int]]:
        step = self._grid.cells_per_frame
        return [(start, min(start + step, last)) for start in range(first, last, step)]

    def _writers(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(sorted({number for number in self._writer[start:stop] if number is not None}))


def grid_of(bounds: list[tuple[int, int]], itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Grid:
    """Cut parts with these `bounds` (elements, one after another) into cells of at most `chunk_bytes` each."""
    chunk = max(1, chunk_bytes // itemsize)
    edges, parts, longest = [0], [0], 1
    for start, stop in bounds:
        count = -(-(stop - start) // chunk)
        edges += [start + (stop - start) * cell // count for cell in range(1, count + 1)]
        parts.append(len(edges) - 1)
        longest = max(longest, -(-(stop - start) // max(1, count)))
    return Grid(tuple(edges), tuple(parts), max(1, chunk // longest))


def even_grid(size: int, num_parts: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Grid:
    """The grid of `size` elements in parts of `part_bounds`."""
    return grid_of(part_bounds(size, num_parts), itemsize, chunk_bytes)
