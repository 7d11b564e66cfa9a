"""Assembles a rank's batches: reads the windows of all lanes in turn, and copies each row straight to its batch.

The plan says in which row of which batch each record of a window belongs, before the window is read. So a row is copied
once, from where it was decoded into the arrays of its batch. The steps of a rank are cut into chunks; the arrays of a
chunk hold its rows after the first step of their encoding (lockstep/features/encode/transforms.py). A chunk is complete
when each lane has been read up to its end. Decision 074.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.encode.transforms import ArrayPlan, Lists
from lockstep.training.batches.decode import (
    BYTES_AT_ONCE,
    ROWS_AT_ONCE,
    DecodedRows,
    RowDecoder,
    record_location,
)
from lockstep.training.batches.kernels import PAIR_BYTES
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Run
from lockstep.training.reading.buffer_pool import Slabs
from lockstep.training.reading.reader import SplitReader

_BLOCKS_AHEAD = 8  # looked up in the plan in one call, which costs as much for many as for one
# A strip is what is read of a TFRecord block at once: at most STRIP_BYTES, the lane's share of STRIPS_READ_BYTES (half
# of what the reader holds ahead), and its share of STRIPS_BYTES in the arrays of chunks.
STRIP_BYTES = 512 << 10
STRIPS_READ_BYTES = 32 << 20
STRIPS_BYTES = 16 << 20
# Lanes loaded together are neighbours in a batch: their rows share cache lines.
_LEAST_LANES = 4


class Chunk:
    """The rows of a chunk, for each column of `made` after the first step of its encoding; Lists as (address, count).

    targets (k,) int64: the address of each column.
    """

    __slots__ = ("_made", "arrays", "epochs", "kept", "targets")

    def __init__(self, made: Sequence[ArrayPlan], rows: int, slabs: Slabs) -> None:
        self._made = made
        self.arrays = [
            slabs.array((rows, 2), np.int64) if one.lists else slabs.array((rows, *one.row.shape), one.row.dtype)
            for one in made
        ]
        self.epochs = slabs.array((rows,), np.int64)
        self.targets = np.array([array.ctypes.data for array in self.arrays], dtype=np.int64)
        self.kept: set[DecodedRows] = set()  # they own the lists that rows point to

    def columns(self, rows: slice) -> list[npt.NDArray[Any] | Lists]:
        """Some rows of each column; all of them must have been filled."""
        return [_in_order(made, array[rows]) for made, array in zip(self._made, self.arrays, strict=True)]


def row_bytes(made: ArrayPlan) -> int:
    """Bytes of a row of a column, or of one item of its Lists."""
    return int(np.prod(made.row.shape, dtype=np.int64)) * np.dtype(made.row.dtype).itemsize


def _in_order(made: ArrayPlan, rows: npt.NDArray[Any]) -> npt.NDArray[Any] | Lists:
    """Return plain rows unchanged, and lists copied end to end."""
    if not made.lists:
        return rows
    from lockstep.training.batches.kernels import join_lists

    offsets = np.concatenate([[0], np.cumsum(rows[:, 1])]).astype(np.int64)
    values = np.empty((int(offsets[-1]), *made.row.shape), dtype=made.row.dtype)
    join_lists(rows, row_bytes(made), offsets, values.ctypes.data)
    return Lists(values, offsets)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one window that a strip holds: `count` records after the first `skip`.

    `window` is the window's number in the lane's epoch. It gives the samples first..first + size - 1 of the stream, in
    the order of the plan's window_order.
    """

    epoch: int
    window: int
    first: int
    size: int
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Some of a lane's records, in the order of the plan: those of `run`."""

    lane: int
    run: Run
    pieces: tuple[Piece, ...]


class LaneStream:
    """The strips of a lane from any sample on: each at most `strip_records` of one block, cut at the ends of windows if
    these are shorter.
    """

    def __init__(self, plan: EpochPlan, lane: int, strip_records: int) -> None:
        self.lane = lane
        self._plan, self._strip_records = plan, strip_records
        self.seek(0)

    def seek(self, n: int) -> None:
        """Continue with the window of sample n."""
        epoch, offset = self._plan.lane_at(self.lane, n)
        self._enter(epoch, n - offset)
        self._at = self._known = offset - offset % self._plan.window_records

    def _enter(self, epoch: int, first: int) -> None:
        # The epoch, the first sample of the lane's span in it, and the span's first position and size.
        self._epoch, self._first = epoch, first
        self._begin, end = self._plan.lane_span(epoch, self.lane)
        self._size = end - self._begin
        self._at = self._known = 0  # offsets in the span: read so far, and looked up in the plan so far
        self._runs: deque[Run] = deque()

    @property
    def read(self) -> int:
        """How many records of the stream have been read."""
        return self._first + self._at

    @property
    def ready(self) -> int:
        """The first sample that may be unread: all samples before it are in strips that `take` returned."""
        if self._at >= self._size:
            return self._first + self._size
        return self._first + self._at - self._at % self._plan.window_records

    def peek(self, until: int) -> Run | None:
        """The records of the next strip; None at the end of an epoch if all samples before `until` have been read."""
        return None if self._at >= self._size and self.ready >= until else self._run()

    def take(self) -> Strip:
        """Return the lane's next strip and continue after it."""
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
        """The records of the next strip, if need be of the next epoch."""
        while self._at >= self._size:  # a lane may get no sample of an epoch
            self._enter(self._epoch + 1, self._first + self._size)
        if not self._runs:
            until = min(self._size, self._known + _BLOCKS_AHEAD * self._plan.block_records)
            offset = self._known
            for run in self._plan.runs(self._epoch, self._begin + self._known, self._begin + until):
                for count, skip in self._cuts(offset, run.count):
                    self._runs.append(Run(run.shard, run.first_record + skip, count))
                offset += run.count
            self._known = until
        return self._runs[0]

    def _cuts(self, offset: int, records: int) -> Iterator[tuple[int, int]]:
        """The strips of a run that begins at an offset in the span: (records, records of the run before them)."""
        window, done = self._plan.window_records, 0
        while done < records:
            end = offset + done + self._strip_records
            if window <= self._strip_records:
                end -= end % window
            count = min(records - done, end - offset - done)
            yield count, done
            done += count


class Assembly:
    """Chunks of `chunk_steps` steps of the batches of some lanes, from any step on.

    Memory: a window and a strip of each lane after the first step of its encoding (all strips together STRIPS_BYTES),
    the same again loaded ahead, BYTES_AT_ONCE of records, and one or two blocks for each lane in formats that are read
    by whole blocks. `at` says what is being read, for error messages. `reads` is called with what is read or decoded
    next, and with "" after it. Not thread-safe.
    """

    def __init__(
        self, plan: EpochPlan, reader: SplitReader, encoder: Encoder, lanes: Sequence[int], chunk_steps: int
    ) -> None:
        self.at = "the first batch"
        self.reads: Callable[[str | range], None] = lambda what: None
        self._plan, self._reader, self._encoder, self._chunk_steps = plan, reader, encoder, chunk_steps
        self._each = plan.global_batch // plan.lanes
        self._rows = self._each * len(lanes)
        self._first_lane = lanes[0]
        # A lane reads one block, or several if it interleaves. As many again are cut by the ends of its parts and wait
        # for another lane; they must not evict the blocks that are being read.
        reader.read_in_turn(2 * len(lanes) * (plan.interleave or 1) + 1)
        self._decoder = RowDecoder(reader, encoder)
        made = [one for _, one in encoder.made]
        self._made = made
        self._widths = np.array([PAIR_BYTES if one.lists else row_bytes(one) for one in made], dtype=np.int64)
        # The values of lists stay where they were decoded.
        waiting_bytes = reader.record_bytes if any(one.lists for one in made) else int(self._widths.sum())
        share = STRIPS_BYTES // len(lanes) // waiting_bytes
        strip_bytes = min(STRIP_BYTES, STRIPS_READ_BYTES // len(lanes))
        strip_records = max(1, min(strip_bytes // reader.record_bytes, share, plan.block_records))
        self._streams = [LaneStream(plan, lane, strip_records) for lane in lanes]
        # Samples loaded ahead for each lane: as many as are loaded at once, at most those of an epoch.
        self._ahead = min(max(strip_records, plan.window_records), max(1, plan.total // plan.lanes))
        together = min(ROWS_AT_ONCE // strip_records, BYTES_AT_ONCE // (strip_records * reader.record_bytes))
        self._together = max(_LEAST_LANES, min(len(lanes), together))
        self._far = not reader.is_local
        self._slabs = Slabs()
        self._chunks: dict[int, Chunk] = {}
        self._start, self._hinted = 0, False
        self.step = -1
        """The next step."""

    def seek(self, step: int) -> None:
        """Continue with a step: skip ahead if that reads no more than a fresh start does, else drop what was loaded."""
        if 0 <= self.step <= step and (step - self.step) * self._each <= self._ahead:
            self.step = step
            return
        self.step, self._start = step, step * self._each
        self._chunks.clear()
        self._reader.forget_hints()
        for stream in self._streams:
            stream.seek(self._start)
        self._hinted = False

    def take(self, last_step: int) -> tuple[int, Encoded, npt.NDArray[np.int64]]:
        """The next steps up to the end of their chunk or `last_step`: their number, rows, and the epoch of each row."""
        number, skip = divmod(self.step, self._chunk_steps)
        stop = min(last_step, (number + 1) * self._chunk_steps)
        while self._load(stop, last_step):
            continue
        chunk, rows = self._chunks[number], slice(skip * self._rows, (skip + stop - self.step) * self._rows)
        self.reads(range(self.step, stop))
        late = self._encoder.late(chunk.columns(rows))
        self.reads("")
        steps, self.step = stop - self.step, stop
        for old in [old for old in self._chunks if (old + 1) * self._chunk_steps <= stop]:
            del self._chunks[old]
        return steps, late, chunk.epochs[rows]

    def load_ahead(self, last_step: int) -> None:
        """Load until each lane is a strip or window ahead of the next step, or has reached `last_step`.

        This makes the cost of steps even.
        """
        goal = len(self._streams) * (self._ahead + self.step * self._each)
        while sum(stream.read for stream in self._streams) < goal and self._load(last_step, last_step):
            continue

    def _load(self, stop: int, last_step: int) -> bool:
        """Load the next windows of the lanes that have read least; False when all have reached step `stop`."""
        try:
            return self._loaded_more(stop, last_step)
        except BaseException:
            self.step = -1  # some lanes may have advanced and others not: the next seek starts over
            raise

    def _loaded_more(self, stop: int, last_step: int) -> bool:
        unready = [stream for stream in self._streams if stream.ready < stop * self._each]
        if not unready:
            return False
        unready.sort(key=lambda stream: stream.read)  # stable: lanes stay in order
        streams = unready[: self._together]
        if not self._hinted:  # at the start nothing is being fetched yet
            self._hint(unready, last_step)
            self._hinted = True
        strips = [stream.take() for stream in streams]

        def about(number: int) -> None:
            step = max(self.step, strips[number].pieces[0].first // self._each)
            self.at = f"lane {strips[number].lane} of split `{self._plan.split}` at step {step}"
            run = strips[number].run
            place = record_location(self._reader, run.shard, run.first_record)
            self.reads(f"{place} and the {run.count - 1} records after it")

        decoded = self._decoder.load([strip.run for strip in strips], about)
        self._hint(streams, last_step)
        self._put(strips, decoded)
        self.reads("")
        return True

    def _hint(self, streams: Sequence[LaneStream], last_step: int) -> None:
        # Reading from the page cache takes less time than handing the bytes over between threads.
        if self._far:
            runs = [stream.peek(last_step * self._each) for stream in streams]
            self._reader.prefetch(run for run in runs if run is not None)

    def _put(self, strips: Sequence[Strip], decoded: Sequence[tuple[DecodedRows, int]]) -> None:
        """Copy the records of strips to their batches; `decoded` has the rows of each strip and its first row."""
        from lockstep.training.batches.kernels import assign_rows, scatter

        base, chunk_samples = self.step // self._chunk_steps, self._chunk_steps * self._each
        last = max(strip.pieces[-1].first + strip.pieces[-1].size for strip in strips) - 1
        chunks = [self._chunk(number) for number in range(base, last // chunk_samples + 1)]
        if not chunks:  # a seek skipped all of them
            return
        chunk_of, row_of = np.empty((2, sum(strip.run.count for strip in strips)), dtype=np.int64)
        assign_rows(
            *self._pieces(strips),
            self._each,
            self._rows,
            base * self._chunk_steps,
            self._chunk_steps,
            max(self._start, base * chunk_samples),  # samples that a seek skipped have no chunk
            _column(chunk.epochs.ctypes.data for chunk in chunks),
            chunk_of,
            row_of,
        )
        numbers = {rows: number for number, rows in enumerate(dict.fromkeys(rows for rows, _ in decoded))}
        wrong, wrong_rows = scatter(
            self._widths,
            np.stack([rows.forms for rows in numbers]),
            np.stack([rows.sources for rows in numbers]),
            _column(numbers[rows] for rows, _ in decoded),
            _column(row for _, row in decoded),
            _column(strip.run.count for strip in strips),
            chunk_of,
            row_of,
            np.stack([chunk.targets for chunk in chunks]),
        )
        if wrong >= 0:
            self._decoder.refuse(list(numbers)[wrong_rows], wrong)
        for rows in numbers:
            if rows.has_lists:
                for chunk in chunks:
                    chunk.kept.add(rows)

    def _pieces(self, strips: Sequence[Strip]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The orders of all windows that strips have a part of, one after another, and the pieces as `place` takes
        them. Those of windows that are equally long are worked out in one call.
        """
        alike: dict[int, dict[tuple[int, int, int], int]] = defaultdict(dict)
        for strip in strips:
            for piece in strip.pieces:
                alike[piece.size].setdefault((piece.epoch, strip.lane, piece.window), len(alike[piece.size]))
        orders, start_of, start = [], {}, 0
        for size, windows in alike.items():
            orders.append(self._plan.window_orders(list(windows), size).ravel())
            start_of[size] = start
            start += size * len(windows)
        pieces = [
            (
                strip.lane - self._first_lane,
                piece.epoch,
                piece.first,
                piece.size,
                piece.skip,
                piece.count,
                start_of[piece.size] + piece.size * alike[piece.size][piece.epoch, strip.lane, piece.window],
            )
            for strip in strips
            for piece in strip.pieces
        ]
        return np.concatenate(orders), np.array(pieces, dtype=np.int64)

    def _chunk(self, number: int) -> Chunk:
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = Chunk(self._made, self._chunk_steps * self._rows, self._slabs)
        return chunk


def _column(values: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)
