"""Rows read and decoded many at a time, made ready to be put into batches: strips of TFRecord, blocks of the others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.encode.encoder import Encoder
from lockstep.features.encode.transforms import Lists, refused_row
from lockstep.features.examples.codec import RecordDecoder
from lockstep.storage.errors import CorruptionError, DataError
from training.batches.kernels import ADDRESSES, NARROWED, VALUES
from training.plan.epoch_plan import EpochPlan
from training.plan.order import Run
from training.reading.reader import SplitReader


def of_record(reader: SplitReader, shard: int, record: int) -> str:
    """File, record and block (of Parquet: row group and row in it) of a record of a shard."""
    url = reader.stored[shard][1]
    block, row = divmod(record, reader.table.block_records)
    within = f"row group {block}, row {row}" if url.endswith(".parquet") else f"block {block}"
    return f"{url}, record {record} ({within})"


def placed(error: DataError, place: str) -> DataError:
    """The same error, its place named; one of damaged bytes names its own."""
    if isinstance(error, CorruptionError):
        return error
    return DataError(f"{error.what}: {place}", got=error.got, allowed=error.allowed, next_step=error.next_step)


def of_batch_row(plan: EpochPlan, reader: SplitReader, lanes: range, step: int, row: int) -> str:
    """File and record of row `row` of a rank's batches from `step` on, laid end to end."""
    each = plan.global_batch // plan.lanes
    steps, within = divmod(row, len(lanes) * each)
    lane, number = divmod(within, each)
    n = (step + steps) * each + number
    ((epoch, positions),) = plan.lane_positions(lanes[lane], n, n + 1)
    (run,) = plan.runs(epoch, int(positions[0]), int(positions[0]) + 1)
    return of_record(reader, run.shard, run.first_record)


def of_row_in_order(reader: SplitReader, row: int) -> str:
    """File and record of row `row` of the split, in the order of the files."""
    (run,) = reader.table.rows(row, row + 1)
    return of_record(reader, run.shard, run.first_record)


I64 = npt.NDArray[np.int64]
# What is decoded and encoded at once: enough that calls cost nothing beside it, little enough for the caches.
ROWS_AT_ONCE = 16_384
BYTES_AT_ONCE = 4 << 20


class Unit:
    """Some rows of a split, each column of the encoder's `made` after the first of its two steps.

    sources, forms (k,) int64: where the rows of each column lie and how, as training.batches.kernels.scatter takes
    them; of Lists, (address, count) of each. What they point to lives as long as the unit. `runs` are its records, in
    order.
    """

    __slots__ = ("_kept", "forms", "has_lists", "rows", "runs", "sources")

    def __init__(self, columns: int, runs: Sequence[Run], kept: object) -> None:
        self.rows, self.runs = sum(run.count for run in runs), runs
        self.sources, self.forms = np.zeros((2, columns), dtype=np.int64)
        self.has_lists = False
        self._kept: list[object] = [kept]

    def put(self, number: int, rows: npt.NDArray[Any] | Lists, form: int = VALUES) -> None:
        """Say where the rows of a column are, and hold them."""
        self._kept.append(rows)
        if isinstance(rows, Lists):
            self.has_lists = True
            pairs = np.empty((len(rows), 2), dtype=np.int64)
            pairs[:, 0] = rows.values.ctypes.data + rows.values.itemsize * rows.offsets[:-1]
            pairs[:, 1] = rows.counts
            self._kept.append(pairs)
            rows = pairs
        self.sources[number], self.forms[number] = rows.ctypes.data, form


class UnitReader:
    """Reads runs as units; that of a block which is only read whole stays with the block in the reader.

    Not safe for several threads at once.
    """

    def __init__(self, reader: SplitReader, encoder: Encoder) -> None:
        self._reader, self._encoder = reader, encoder
        # Columns of which nothing is made: rows are copied from where they lie, by the numbers of `made`.
        self._direct = {
            number: column
            for number, (column, made) in enumerate(encoder.made)
            if made.stored is not None and not reader.schema[column].nullable
        }
        self._forms = {number: self._form(number) for number in self._direct}
        self._decoder = RecordDecoder(reader.schema, encoder.columns, frozenset(self._direct.values()))

    def load(self, runs: Sequence[Run], about: Callable[[int], None]) -> list[tuple[Unit, int]]:
        """The unit of each run, and which of its rows is the run's first; `about(i)` is called before run i is read.

        Raises as SplitReader.read and Encoder.encode do, the latter's errors with file, record and block.
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

    def refuse(self, unit: Unit, number: int) -> NoReturn:
        """Raise the DataError for a column of which a number would become another one."""
        values = np.ctypeslib.as_array((ctypes.c_int64 * unit.rows).from_address(int(unit.sources[number])))
        early = self._encoder.made[number][1].early
        row, error = refused_row(lambda start, stop: early(pa.array(values[start:stop])), unit.rows)
        raise self._placed(unit, row, error)

    def _decoded(self, parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> dict[int, tuple[Unit, int]]:
        """Runs of records in one unit."""
        frames = self._decoder.decode_frames([data for _, _, data in parts], [run.count for _, run, _ in parts])
        if frames is None:
            # One by one by the reader, which says what is wrong with which record, or takes another form than ours.
            runs = [run for _, run, _ in parts]
            unit = self._unit(pa.concat_batches([self._reader.read(run) for run in runs]), runs)
        else:
            unit = Unit(len(self._encoder.made), [run for _, run, _ in parts], frames)
            for number, column in self._direct.items():
                if column in frames.places:
                    unit.put(number, frames.places[column], ADDRESSES)
                else:
                    unit.sources[number], unit.forms[number] = frames.values[column], self._forms[number]
            self._make(unit, frames.batch, self._direct)
        return {part[0]: (unit, first) for part, first in zip(parts, _starts(parts), strict=True)}

    def _block(self, run: Run) -> tuple[Unit, int]:
        block = self._reader.kept_block(run)
        skip = run.first_record % self._reader.table.block_records
        if not isinstance(block.unit, Unit):
            block.unit = self._unit(block.rows, [Run(run.shard, run.first_record - skip, len(block.rows))])
        return block.unit, skip

    def _unit(self, batch: pa.RecordBatch, runs: Sequence[Run]) -> Unit:
        unit = Unit(len(self._encoder.made), runs, batch)
        direct = {}
        for number, column in self._direct.items():
            values = batch.column(column)
            if pa.types.is_int64(values.type) or pa.types.is_float32(values.type):
                direct[number] = column
                unit.put(number, values.to_numpy(), self._forms[number])
        self._make(unit, batch, direct)
        return unit

    def _make(self, unit: Unit, batch: pa.RecordBatch, direct: Container[int]) -> None:
        early = self._encoder.early
        try:
            made = early(batch, direct)
        except DataError:
            row, error = refused_row(lambda start, stop: early(batch.slice(start, stop - start), direct), unit.rows)
            raise self._placed(unit, row, error) from None
        for number, rows in enumerate(made):
            if rows is not None:
                unit.put(number, rows)

    def _placed(self, unit: Unit, row: int, error: DataError) -> DataError:
        """The error for a row of a unit, with the record that it is."""
        for run in unit.runs:
            if row < run.count:
                return placed(error, of_record(self._reader, run.shard, run.first_record + row))
            row -= run.count
        raise AssertionError(f"row {row} behind the last run")

    def _form(self, number: int) -> int:
        made = self._encoder.made[number][1]
        return VALUES if made.row.dtype == made.stored else NARROWED


def _starts(parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> Iterator[int]:
    start = 0
    for _, run, _ in parts:
        yield start
        start += run.count
