"""A rank's batches put together: windows of all lanes are read in turn, and each row goes straight to its place.

What a window holds is known to be at certain rows of certain batches before it is read, so its rows are copied once,
from where they were decoded into the arrays of these batches. The steps of a rank are cut into chunks; a chunk's arrays
hold its rows after the first step of their encoding (lockstep/features/encode/making.py). A chunk is whole once each
lane was read up to its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.encode.encoder import Encoded, Encoder
from training.batches.buffer_pool import Slabs
from training.batches.chunk import Chunk, row_bytes
from training.batches.decode import BYTES_AT_ONCE, ROWS_AT_ONCE, Unit, UnitReader
from training.batches.kernels import PAIR_BYTES
from training.batches.lanes import LaneStream, Strip
from training.plan.epoch_plan import EpochPlan
from training.reading.reader import SplitReader

# A strip is what is read of a TFRecord block at once: this, or a lane's share of half of what the reader holds ahead,
# or as many records as are its share of STRIPS_BYTES in the arrays of chunks.
STRIP_BYTES = 512 << 10
STRIPS_READ_BYTES = 32 << 20
STRIPS_BYTES = 16 << 20
# Lanes whose windows are loaded together: neighbours in a batch, whose rows share cache lines of its arrays.
_LEAST_LANES = 4


class Assembly:
    """Chunks of `chunk_steps` steps of the batches of some lanes, from any step on.

    Memory: a window and a strip of each lane after the first step of its encoding (strips are STRIPS_BYTES in all), as
    much again loaded ahead, BYTES_AT_ONCE of records, and where only whole blocks are read one or two for each lane.
    `at` says in words what is being read. Not safe for several threads at once.
    """

    def __init__(
        self, plan: EpochPlan, reader: SplitReader, encoder: Encoder, lanes: Sequence[int], chunk_steps: int
    ) -> None:
        self.at = "the first batch"
        self._plan, self._reader, self._encoder, self._chunk_steps = plan, reader, encoder, chunk_steps
        self._each = plan.global_batch // plan.lanes
        self._rows = self._each * len(lanes)
        self._first_lane = lanes[0]
        # A lane is in one block or interleaves some; as many again are those that the ends of its parts cut, which wait
        # for another lane: they must not push out those that are being read.
        reader.keep_blocks = 2 * len(lanes) * (plan.interleave or 1) + 1
        self._units = UnitReader(reader, encoder)
        made = [one for _, one in encoder.made]
        self._made = made
        self._widths = np.array([PAIR_BYTES if one.lists else row_bytes(one) for one in made], dtype=np.int64)
        # A list's values wait where they were decoded.
        waiting_bytes = reader.record_bytes if any(one.lists for one in made) else int(self._widths.sum())
        share = STRIPS_BYTES // len(lanes) // waiting_bytes
        strip_bytes = min(STRIP_BYTES, STRIPS_READ_BYTES // len(lanes))
        strip_records = max(1, min(strip_bytes // reader.record_bytes, share, plan.block_records))
        self._streams = [LaneStream(plan, lane, strip_records) for lane in lanes]
        # What is loaded ahead of a lane: as much as is loaded at once, and no more than an epoch gives it.
        self._ahead = min(max(strip_records, plan.window_records), max(1, plan.total // plan.lanes))
        together = min(ROWS_AT_ONCE // strip_records, BYTES_AT_ONCE // (strip_records * reader.record_bytes))
        self._together = max(_LEAST_LANES, min(len(lanes), together))
        self._slabs = Slabs()
        self._chunks: dict[int, Chunk] = {}
        self._start, self._hinted = 0, False
        self.step = -1
        """The step that comes next."""

    def seek(self, step: int) -> None:
        """Go on with a step: by reading on where that is no further than a lane would read for its first batch there,
        else what was loaded is dropped.
        """
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
        """The next steps, as far as their chunk goes and at most up to `last_step`: how many they are, their rows and
        the epoch of each row.
        """
        number, skip = divmod(self.step, self._chunk_steps)
        stop = min(last_step, (number + 1) * self._chunk_steps)
        while self._load(stop, last_step):
            continue
        chunk, rows = self._chunks[number], slice(skip * self._rows, (skip + stop - self.step) * self._rows)
        late = self._encoder.late(chunk.columns(rows))
        steps, self.step = stop - self.step, stop
        for old in [old for old in self._chunks if (old + 1) * self._chunk_steps <= stop]:
            del self._chunks[old]
        return steps, late, chunk.epochs[rows]

    def load_ahead(self, last_step: int) -> None:
        """Load until a strip or window of each lane is ahead of the next step, or all up to `last_step`; so steps cost
        alike.
        """
        goal = len(self._streams) * (self._ahead + self.step * self._each)
        while sum(stream.read for stream in self._streams) < goal and self._load(last_step, last_step):
            continue

    def _load(self, stop: int, last_step: int) -> bool:
        """Load the next windows of the lanes that are furthest behind; False where all reach step `stop`."""
        try:
            return self._loaded_more(stop, last_step)
        except BaseException:
            self.step = -1  # some lanes may have gone on and others not: who comes again begins anew
            raise

    def _loaded_more(self, stop: int, last_step: int) -> bool:
        behind = [stream for stream in self._streams if stream.ready < stop * self._each]
        if not behind:
            return False
        behind.sort(key=lambda stream: stream.read)  # stable: lanes stay in order
        streams = behind[: self._together]
        if not self._hinted:  # at the beginning nothing is on its way yet
            self._hint(behind, last_step)
            self._hinted = True
        strips = [stream.take() for stream in streams]

        def about(number: int) -> None:
            step = max(self.step, strips[number].pieces[0].first // self._each)
            self.at = f"lane {strips[number].lane} of split `{self._plan.split}` at step {step}"

        units = self._units.load([strip.run for strip in strips], about)
        self._hint(streams, last_step)
        self._put(strips, units)
        return True

    def _hint(self, streams: Sequence[LaneStream], last_step: int) -> None:
        # What the page cache has is read in less time than it takes to hand it over between threads.
        if not self._reader.is_local:
            runs = [stream.peek(last_step * self._each) for stream in streams]
            self._reader.prefetch(run for run in runs if run is not None)

    def _put(self, strips: Sequence[Strip], units: Sequence[tuple[Unit, int]]) -> None:
        """Copy the records of strips, of which `units` has the unit and the first row, to their places."""
        from training.batches.kernels import place, scatter

        base, chunk_samples = self.step // self._chunk_steps, self._chunk_steps * self._each
        last = max(strip.pieces[-1].first + strip.pieces[-1].size for strip in strips) - 1
        chunks = [self._chunk(number) for number in range(base, last // chunk_samples + 1)]
        if not chunks:  # a seek passed over all of them
            return
        chunk_of, row_of = np.empty((2, sum(strip.run.count for strip in strips)), dtype=np.int64)
        place(
            *self._pieces(strips),
            self._each,
            self._rows,
            base * self._chunk_steps,
            self._chunk_steps,
            max(self._start, base * chunk_samples),  # of what a seek passed over, no chunk is there
            _column(chunk.epochs.ctypes.data for chunk in chunks),
            chunk_of,
            row_of,
        )
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in units))}
        wrong, unit_number = scatter(
            self._widths,
            np.stack([unit.forms for unit in numbers]),
            np.stack([unit.sources for unit in numbers]),
            _column(numbers[unit] for unit, _ in units),
            _column(row for _, row in units),
            _column(strip.run.count for strip in strips),
            chunk_of,
            row_of,
            np.stack([chunk.targets for chunk in chunks]),
        )
        if wrong >= 0:
            self._units.refuse(list(numbers)[unit_number], wrong)
        for unit in numbers:
            if unit.has_lists:
                for chunk in chunks:
                    chunk.kept.add(unit)

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
