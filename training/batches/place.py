"""Where a row of a batch comes from: file, record and block, for the message about what is wrong with it."""

from __future__ import annotations

from lockstep.storage.errors import CorruptionError, DataError
from training.plan.epoch_plan import EpochPlan
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
