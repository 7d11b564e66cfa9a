"""Reads and decodes many rows at once for batches: strips of TFRecord blocks, whole blocks of other formats."""

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
from lockstep.training.batches.kernels import ADDRESSES, NARROWED, VALUES
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Run
from lockstep.training.reading.reader import SplitReader

I64 = npt.NDArray[np.int64]
# Decoded and encoded in one call: enough to make the cost of the call negligible, few enough for the caches.
ROWS_AT_ONCE = 16_384
BYTES_AT_ONCE = 4 << 20


def record_location(reader: SplitReader, shard: int, record: int) -> str:
    """Names a record of a shard in an error: file, record and block (in Parquet: row group and its row)."""
    return record_words(reader.stored[shard][1], record, reader.table.block_records)


def record_words(url: str, record: int, block_records: int) -> str:
    """Describe a record's place as `record_location` does, by the shard's URL."""
    block, row = divmod(record, block_records)
    within = f"row group {block}, row {row}" if url.endswith(".parquet") else f"block {block}"
    return f"{url}, record {record} ({within})"


def located(error: DataError, location: str) -> DataError:
    """Return the error with the location of the row; a CorruptionError already has one."""
    if isinstance(error, CorruptionError):
        return error
    return DataError(f"{error.what}: {location}", got=error.got, allowed=error.allowed, next_step=error.next_step)


def batch_row_location(plan: EpochPlan, reader: SplitReader, lanes: range, step: int, row: int) -> str:
    """File and record of row `row` of a rank's batches, counted from the first row of batch `step`."""
    run = batch_row(plan, lanes, step, row)
    return record_location(reader, run.shard, run.first_record)


def batch_row(plan: EpochPlan, lanes: range, step: int, row: int) -> Run:
    """The record of such a row, by the plan alone."""
    each = plan.global_batch // plan.lanes
    steps, within = divmod(row, len(lanes) * each)
    lane, number = divmod(within, each)
    n = (step + steps) * each + number
    ((epoch, positions),) = plan.lane_positions(lanes[lane], n, n + 1)
    (run,) = plan.runs(epoch, int(positions[0]), int(positions[0]) + 1)
    return run


def ordered_row_location(reader: SplitReader, row: int) -> str:
    """File and record of row `row` of the split, in file order."""
    (run,) = reader.table.rows(row, row + 1)
    return record_location(reader, run.shard, run.first_record)


class DecodedRows:
    """Some rows of a split, with each column of the encoder's `made` after the first of its two steps.

    sources, forms (k,) int64: the address of each column and its form, as lockstep.training.batches.kernels.scatter
    takes them; of Lists, an (address, count) for each row. This object keeps the memory alive. `runs` are its records,
    in order.
    """

    __slots__ = ("_kept", "forms", "has_lists", "rows", "runs", "sources")

    def __init__(self, columns: int, runs: Sequence[Run], kept: object) -> None:
        self.rows, self.runs = sum(run.count for run in runs), runs
        self.sources, self.forms = np.zeros((2, columns), dtype=np.int64)
        self.has_lists = False
        self._kept: list[object] = [kept]

    def put(self, number: int, rows: npt.NDArray[Any] | Lists, form: int = VALUES) -> None:
        """Set the rows of a column, and keep them alive."""
        self._kept.append(rows)
        if isinstance(rows, Lists):
            self.has_lists = True
            pairs = np.empty((len(rows), 2), dtype=np.int64)
            pairs[:, 0] = rows.values.ctypes.data + rows.values.itemsize * rows.offsets[:-1]
            pairs[:, 1] = rows.counts
            self._kept.append(pairs)
            rows = pairs
        self.sources[number], self.forms[number] = rows.ctypes.data, form


class RowDecoder:
    """Reads runs and decodes them. The rows of a block that is only read whole are kept with the block in the reader.

    Not thread-safe.
    """

    def __init__(self, reader: SplitReader, encoder: Encoder) -> None:
        self._reader, self._encoder = reader, encoder
        # Columns that the encoder does not change, by their number in `made`: copied from where they were decoded.
        self._direct = {
            number: column
            for number, (column, made) in enumerate(encoder.made)
            if made.stored is not None and not reader.schema[column].nullable
        }
        self._forms = {number: self._form(number) for number in self._direct}
        self._decoder = RecordDecoder(reader.schema, encoder.columns, frozenset(self._direct.values()))

    def load(self, runs: Sequence[Run], about: Callable[[int], None]) -> list[tuple[DecodedRows, int]]:
        """The decoded rows of each run, and the number of the run's first row; calls `about(i)` before it reads run i.

        Raises what SplitReader.read and Encoder.encode raise; errors of the latter name file, record and block.
        """
        found: dict[int, tuple[DecodedRows, int]] = {}
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

    def refuse(self, decoded: DecodedRows, number: int) -> NoReturn:
        """Raise the DataError for a column with an integer that float32 cannot hold."""
        values = np.ctypeslib.as_array((ctypes.c_int64 * decoded.rows).from_address(int(decoded.sources[number])))
        early = self._encoder.made[number][1].early
        row, error = refused_row(lambda start, stop: early(pa.array(values[start:stop])), decoded.rows)
        raise self._located(decoded, row, error)

    def _decoded(self, parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> dict[int, tuple[DecodedRows, int]]:
        """Decode runs of records together."""
        frames = self._decoder.decode_frames([data for _, _, data in parts], [run.count for _, run, _ in parts])
        if frames is None:
            # The reader decodes them one by one: it names a bad record, and reads Examples that others wrote.
            runs = [run for _, run, _ in parts]
            decoded = self._decode_rows(pa.concat_batches([self._reader.read(run) for run in runs]), runs)
        else:
            decoded = DecodedRows(len(self._encoder.made), [run for _, run, _ in parts], frames)
            for number, column in self._direct.items():
                if column in frames.places:
                    decoded.put(number, frames.places[column], ADDRESSES)
                else:
                    decoded.sources[number], decoded.forms[number] = frames.values[column], self._forms[number]
            self._make(decoded, frames.batch, self._direct)
        return {part[0]: (decoded, first) for part, first in zip(parts, _starts(parts), strict=True)}

    def _block(self, run: Run) -> tuple[DecodedRows, int]:
        block = self._reader.kept_block(run)
        skip = run.first_record % self._reader.table.block_records
        if not isinstance(block.prepared, DecodedRows):
            block.prepared = self._decode_rows(block.rows, [Run(run.shard, run.first_record - skip, len(block.rows))])
        return block.prepared, skip

    def _decode_rows(self, batch: pa.RecordBatch, runs: Sequence[Run]) -> DecodedRows:
        decoded = DecodedRows(len(self._encoder.made), runs, batch)
        direct = {}
        for number, column in self._direct.items():
            values = batch.column(column)
            if pa.types.is_int64(values.type) or pa.types.is_float32(values.type):
                direct[number] = column
                decoded.put(number, values.to_numpy(), self._forms[number])
        self._make(decoded, batch, direct)
        return decoded

    def _make(self, decoded: DecodedRows, batch: pa.RecordBatch, direct: Container[int]) -> None:
        early = self._encoder.early
        try:
            made = early(batch, direct)
        except DataError:
            row, error = refused_row(lambda start, stop: early(batch.slice(start, stop - start), direct), decoded.rows)
            raise self._located(decoded, row, error) from None
        for number, rows in enumerate(made):
            if rows is not None:
                decoded.put(number, rows)

    def _located(self, decoded: DecodedRows, row: int, error: DataError) -> DataError:
        """The error for a row, with its file, record and block."""
        for run in decoded.runs:
            if row < run.count:
                return located(error, record_location(self._reader, run.shard, run.first_record + row))
            row -= run.count
        raise AssertionError(f"row {row} after the last run")

    def _form(self, number: int) -> int:
        made = self._encoder.made[number][1]
        return VALUES if made.row.dtype == made.stored else NARROWED


def _starts(parts: Sequence[tuple[int, Run, npt.NDArray[np.uint8]]]) -> Iterator[int]:
    start = 0
    for _, run, _ in parts:
        yield start
        start += run.count
