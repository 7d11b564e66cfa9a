"""Rows read and decoded many at a time, made ready to be put into batches: strips of TFRecord, blocks of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from features.batch_kernels import ADDRESSES, VALUES
from features.codec.decoder import RecordDecoder
from features.encode import Encoder
from features.making import Lists
from training.positions import Run
from training.reader import SplitReader

I64 = npt.NDArray[np.int64]
# What is decoded and encoded at once: enough that calls cost nothing beside it, little enough for the caches.
ROWS_AT_ONCE = 16_384
BYTES_AT_ONCE = 4 << 20


class Unit:
    """Some rows of a split, each column of the encoder's `made` after the first of its two steps.

    sources, forms (k,) int64: where the rows of each column lie and how, as features.batch_kernels.scatter takes them;
    of Lists, (address, count) of each. What they point to lives as long as the unit.
    """

    __slots__ = ("_kept", "forms", "has_lists", "sources")

    def __init__(self, columns: Sequence[npt.NDArray[Any] | Lists | None], places: Sequence[I64 | None], kept: object):
        held: list[object] = [kept]
        self.sources, self.forms = np.zeros((2, len(columns)), dtype=np.int64)
        self.has_lists = False
        for number, (column, place) in enumerate(zip(columns, places, strict=True)):
            rows = column if isinstance(column, np.ndarray) else place
            if isinstance(column, Lists):
                self.has_lists = True
                rows = np.empty((len(column), 2), dtype=np.int64)
                rows[:, 0] = column.values.ctypes.data + column.values.itemsize * column.offsets[:-1]
                rows[:, 1] = column.counts
                held.append(column)
            assert rows is not None
            held.append(rows)
            self.sources[number] = rows.ctypes.data
            self.forms[number] = ADDRESSES if column is None else VALUES
        self._kept = held


class UnitReader:
    """Reads runs as units. Memory beside them: the last `keep_blocks` blocks that are only read whole and were cut.

    Not safe for several threads at once.
    """

    def __init__(self, reader: SplitReader, encoder: Encoder, keep_blocks: int) -> None:
        self._reader, self._encoder, self._keep_blocks = reader, encoder, keep_blocks
        self._in_place = {
            column
            for column, made in encoder.made
            if made.stored and reader.schema[column].is_tensor and not reader.schema[column].nullable
        }
        self._decoder = RecordDecoder(reader.schema, encoder.columns, self._in_place)
        self._blocks: OrderedDict[tuple[int, int], tuple[Unit, int]] = OrderedDict()  # with the rows not yet read

    def load(self, runs: Sequence[Run], about: Callable[[int], None]) -> list[tuple[Unit, int]]:
        """The unit of each run, and which of its rows is the run's first; `about(i)` is called before run i is read.

        Raises as SplitReader.read and Encoder.encode do.
        """
        found: dict[int, tuple[Unit, int]] = {}
        waiting: list[tuple[int, Run, npt.NDArray[np.uint8]]] = []
        rows = size_bytes = 0
        for number, run in enumerate(runs):
            about(number)
            data = self._reader.raw(run)
            if data is None:
                found[number] = self._block(run)
                continue
            if waiting and (rows + run.count > ROWS_AT_ONCE or size_bytes + len(data) > BYTES_AT_ONCE):
                found |= self._decoded(waiting)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append((number, run, np.frombuffer(data, dtype=np.uint8)))
            rows, size_bytes = rows + run.count, size_bytes + len(data)
        if waiting:
            found |= self._decoded(waiting)
        return [found[number] for number in range(len(runs))]

    def _decoded(self, parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> dict[int, tuple[Unit, int]]:
        """Runs of records in one unit."""
        frames = self._decoder.decode_frames([data for _, _, data in parts])
        if frames is None or frames.counts != tuple(run.count for _, run, _ in parts):
            # One by one by the reader, which says what is wrong with which record, or takes another form than ours.
            batches = [self._reader.read(run) for _, run, _ in parts]
            unit = self._unit(pa.concat_batches(batches))
        else:
            early = self._encoder.early(frames.batch, self._in_place)
            places = [frames.places.get(column) for column, _ in self._encoder.made]
            unit = Unit(early, places, frames)
        return {part[0]: (unit, first) for part, first in zip(parts, _starts(parts), strict=True)}

    def _block(self, run: Run) -> tuple[Unit, int]:
        block, skip = divmod(run.first_record, self._reader.table.block_records)
        unit, left = self._blocks.pop((run.shard, block), (None, 0))
        if unit is None:
            batch = self._reader.block(run)
            unit, left = self._unit(batch), len(batch)
        if left > run.count:  # lanes cut it, and some of it is another lane's
            self._blocks[run.shard, block] = unit, left - run.count
        while len(self._blocks) > self._keep_blocks:
            self._blocks.popitem(last=False)
        return unit, skip

    def _unit(self, batch: pa.RecordBatch) -> Unit:
        return Unit(self._encoder.early(batch), [None] * len(self._encoder.made), batch)


def _starts(parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> Iterator[int]:
    start = 0
    for _, run, _ in parts:
        yield start
        start += run.count
