"""One lane's endless stream of samples: its windows, and the strips of records that they are made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from training.plan import EpochPlan
from training.positions import Run
from training.units import Unit

_BLOCKS_AHEAD = 8  # looked up in the plan at once: a call costs as much for many as for one


@dataclass(frozen=True, slots=True)
class LaneWindow:
    """A window of a lane: samples first..first + count - 1 of its stream, which is `number` of its epoch.

    `start` is the position of its first record in the lane's span of the epoch; the plan's window_order says which
    sample each record is.
    """

    lane: int
    epoch: int
    number: int
    start: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` records of a window, from row `row` of a unit on."""

    unit: Unit
    row: int
    count: int


class LaneStream:
    """The windows of a lane from any sample on. A strip is at most `strip_records` of a block, or, where only whole
    blocks are read (`whole`), all that the lane has of one; a strip that a window cuts is kept for the next.
    """

    def __init__(self, plan: EpochPlan, lane: int, strip_records: int, *, whole: bool = False) -> None:
        self.lane = lane
        self._plan, self._strip_records = plan, plan.block_records if whole else strip_records
        self.seek(0)

    def seek(self, n: int) -> None:
        """Go on with the window of sample n."""
        epoch, offset = self._plan.lane_at(self.lane, n)
        self._enter(epoch, offset - offset % self._plan.window_records, n - offset % self._plan.window_records)

    def _enter(self, epoch: int, start: int, first: int) -> None:
        self.next = first
        """The first sample of the next window."""
        self._epoch, self._start = epoch, start
        begin, end = self._plan.lane_span(epoch, self.lane)
        self._begin, self._size = begin, end - begin
        self._known = self._loaded = start  # positions in the span up to which strips are looked up, and loaded
        self._strips: deque[Run] = deque()
        self._held: deque[tuple[int, Segment]] = deque()  # by the position of the first record

    def window(self) -> LaneWindow:
        """The next window; `take` goes on to the one after it."""
        while self._start >= self._size:  # a lane may have nothing of an epoch
            self._enter(self._epoch + 1, 0, self.next)
        count = min(self._plan.window_records, self._size - self._start)
        number = self._start // self._plan.window_records
        return LaneWindow(self.lane, self._epoch, number, self._start, self.next, count)

    def missing(self) -> list[Run]:
        """The strips of the next window that are not loaded, in order: give their units to `take`."""
        stop, place = min(self._size, self._start + self._plan.window_records), self._loaded
        runs: list[Run] = []
        while place < stop:
            run = self._strip(len(runs))
            runs.append(run)
            place += run.count
        return runs

    def ahead(self) -> Run | None:
        """The strip after the loaded ones, None at the end of the epoch."""
        return self._strip(0) if self._loaded < self._size else None

    def take(self, units: Sequence[tuple[Unit, int]]) -> list[Segment]:
        """The records of the next window, after the units of its missing strips."""
        for unit, row in units:
            run = self._strips.popleft()
            self._held.append((self._loaded, Segment(unit, row, run.count)))
            self._loaded += run.count
        window = self.window()
        stop, found = window.start + window.count, []
        while self._held:
            place, part = self._held[0]
            if place >= stop:
                break
            skip, end = max(0, window.start - place), min(part.count, stop - place)
            found.append(Segment(part.unit, part.row + skip, end - skip))
            if place + part.count > stop:
                break
            self._held.popleft()
        self._start, self.next = stop, window.first + window.count
        return found

    def _strip(self, number: int) -> Run:
        """The strip that comes `number` after the loaded ones."""
        while number >= len(self._strips):
            until = min(self._size, self._known + _BLOCKS_AHEAD * self._plan.block_records)
            for run in self._plan.runs(self._epoch, self._begin + self._known, self._begin + until):
                for skip in range(0, run.count, self._strip_records):
                    count = min(self._strip_records, run.count - skip)
                    self._strips.append(Run(run.shard, run.first_record + skip, count))
            self._known = until
        return self._strips[number]
