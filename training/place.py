"""Where a row of a batch comes from: file and record, for the message about what is wrong with it."""

from __future__ import annotations

from training.plan import EpochPlan
from training.reader import SplitReader


def of_batch_row(plan: EpochPlan, reader: SplitReader, lanes: range, step: int, row: int) -> str:
    """File and record of row `row` of a rank's batches from `step` on, laid end to end."""
    each = plan.global_batch // plan.lanes
    steps, within = divmod(row, len(lanes) * each)
    lane, number = divmod(within, each)
    n = (step + steps) * each + number
    ((epoch, positions),) = plan.lane_positions(lanes[lane], n, n + 1)
    (run,) = plan.runs(epoch, int(positions[0]), int(positions[0]) + 1)
    return f"{reader.stored[run.shard][1]}, record {run.first_record}"


def of_row_in_order(reader: SplitReader, first_block: int, row: int) -> str:
    """File and record of row `row` of the blocks from `first_block` on, in the order of the files."""
    block = first_block
    while row >= reader.table.run(block).count:
        row -= reader.table.run(block).count
        block += 1
    run = reader.table.run(block)
    return f"{reader.stored[run.shard][1]}, record {run.first_record + row}"
