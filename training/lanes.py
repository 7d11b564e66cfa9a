"""One lane's endless stream of samples, shuffled in windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.plan import EpochPlan
from training.reader import SplitReader


@dataclass(frozen=True, slots=True)
class LaneRows:
    """n samples of a lane in order: `batches` hold n rows together, `epochs` (n,) int64 the epoch of each."""

    batches: tuple[pa.RecordBatch, ...]
    epochs: npt.NDArray[np.int64]


class LaneStream:
    """Reads a lane from any sample on; holds one window of decoded rows.

    Rows stay Arrow columns here and are encoded when a batch is put together: a one-hot row is many times larger, and
    one call for all lanes of many batches costs much less than one for each lane.
    """

    def __init__(self, plan: EpochPlan, reader: SplitReader, lane: int) -> None:
        self._plan, self._reader, self._lane = plan, reader, lane
        self._next = 0
        self._window: tuple[int, int] | None = None
        self._rows: pa.RecordBatch | None = None

    def seek(self, n: int) -> None:
        """Go on with sample n of the stream. Nothing that lies before is read but its own window's part."""
        self._next = n

    def take(self, count: int) -> LaneRows:
        """The next `count` samples. Raises CorruptionError for what does not match its checksums."""
        batches: list[pa.RecordBatch] = []
        epochs: list[npt.NDArray[np.int64]] = []
        while count > 0:
            epoch, offset = self._plan.lane_at(self._lane, self._next)
            window, within = divmod(offset, self._plan.window_records)
            part = self._load(epoch, window).slice(within, count)
            batches.append(part)
            epochs.append(np.full(len(part), epoch, dtype=np.int64))
            self._next += len(part)
            count -= len(part)
        return LaneRows(tuple(batches), np.concatenate(epochs) if epochs else np.zeros(0, dtype=np.int64))

    def _load(self, epoch: int, window: int) -> pa.RecordBatch:
        """The rows of a window in their shuffled order; the last one is kept."""
        if self._rows is None or self._window != (epoch, window):
            self._rows = None  # before the next one is read, so that a lane never holds two
            start, stop = self._plan.lane_span(epoch, self._lane)
            start += window * self._plan.window_records
            runs = self._plan.runs(epoch, start, min(stop, start + self._plan.window_records))
            order = self._plan.window_order(epoch, self._lane, window)
            self._rows = self._reader.read_all(runs).take(pa.array(order))
            self._window = (epoch, window)
        return self._rows
