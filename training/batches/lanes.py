"""One lane's endless stream of samples as strips of records in the order of the files, and the windows they are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from training.plan.epoch_plan import EpochPlan
from training.plan.order import Run

_BLOCKS_AHEAD = 8  # looked up in the plan at once: a call costs as much for many as for one


@dataclass(frozen=True, slots=True)
class Piece:
    """What a strip has of one window: its records `skip` up to `skip + count`.

    The window is `window` of the lane in its epoch and gives the samples first..first + size - 1 of the stream, in the
    order that the plan's window_order says.
    """

    epoch: int
    window: int
    first: int
    size: int
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Some of a lane's records, in the order of the plan; `run` says where they lie."""

    lane: int
    run: Run
    pieces: tuple[Piece, ...]


class LaneStream:
    """The strips of a lane from any sample on: at most `strip_records` of one block each, cut between windows where
    these are shorter.
    """

    def __init__(self, plan: EpochPlan, lane: int, strip_records: int) -> None:
        self.lane = lane
        self._plan, self._strip_records = plan, strip_records
        self.seek(0)

    def seek(self, n: int) -> None:
        """Go on with the window of sample n."""
        epoch, offset = self._plan.lane_at(self.lane, n)
        self._enter(epoch, n - offset)
        self._at = self._known = offset - offset % self._plan.window_records

    def _enter(self, epoch: int, first: int) -> None:
        # The epoch that is read, the first sample of the lane's span of it, where that begins and how long it is.
        self._epoch, self._first = epoch, first
        self._begin, end = self._plan.lane_span(epoch, self.lane)
        self._size = end - self._begin
        self._at = self._known = 0  # places in the span: read up to, and looked up to in the plan
        self._runs: deque[Run] = deque()

    @property
    def read(self) -> int:
        """How many samples of the stream come before the next strip's records, in the order of the files."""
        return self._first + self._at

    @property
    def ready(self) -> int:
        """The first sample that may be in a record not read yet: all before it are in strips that `take` gave."""
        if self._at >= self._size:
            return self._first + self._size
        return self._first + self._at - self._at % self._plan.window_records

    def peek(self, until: int) -> Run | None:
        """Where the records of the next strip lie; None at the end of an epoch after which no sample before `until` is
        left to read.
        """
        return None if self._at >= self._size and self.ready >= until else self._run()

    def take(self) -> Strip:
        """The next strip."""
        run = self._run()
        self._runs.popleft()
        strip = Strip(self.lane, run, tuple(self._pieces(self._at, self._at + run.count)))
        self._at += run.count
        return strip

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        while start < stop:
            window, skip = divmod(start, self._plan.window_records)
            begin = start - skip
            size = min(self._plan.window_records, self._size - begin)
            count = min(stop, begin + size) - start
            yield Piece(self._epoch, window, self._first + begin, size, skip, count)
            start += count

    def _run(self) -> Run:
        """The records of the next strip; at the end of an epoch we go on to the next one."""
        while self._at >= self._size:  # a lane may have nothing of an epoch
            self._enter(self._epoch + 1, self._first + self._size)
        if not self._runs:
            until = min(self._size, self._known + _BLOCKS_AHEAD * self._plan.block_records)
            place = self._known
            for run in self._plan.runs(self._epoch, self._begin + self._known, self._begin + until):
                for count, skip in self._cuts(place, run.count):
                    self._runs.append(Run(run.shard, run.first_record + skip, count))
                place += run.count
            self._known = until
        return self._runs[0]

    def _cuts(self, place: int, records: int) -> Iterator[tuple[int, int]]:
        """The strips of a run that begins at a place of the span: (records, those before it)."""
        window, done = self._plan.window_records, 0
        while done < records:
            end = place + done + self._strip_records
            if window <= self._strip_records:
                end -= end % window
            count = min(records - done, end - place - done)
            yield count, done
            done += count
