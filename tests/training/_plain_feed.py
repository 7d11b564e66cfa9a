"""What a rank's batches must be, worked out sample by sample from the plan: the oracle of the feed's tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lockstep.features.encode.encoder import Encoder
from lockstep.training.batches.feed import Batch
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.reader import SplitReader
from tests.builders.blocks import read_all


def plain_batches(
    plan: EpochPlan, reader: SplitReader, encoder: Encoder, lanes: range, first: int, last: int
) -> Iterator[Batch]:
    """Batches first..last-1 of some lanes; reads each epoch whole."""
    each = plan.global_batch // plan.lanes
    whole: dict[int, pa.RecordBatch] = {}
    for step in range(first, last):
        parts, epochs = [], []
        for lane in lanes:
            for epoch, positions in plan.lane_positions(lane, step * each, (step + 1) * each):
                if epoch not in whole:
                    whole[epoch] = read_all(reader, plan.runs(epoch, 0, plan.total))
                parts.append(whole[epoch].take(pa.array(positions)))
                epochs += [epoch] * len(positions)
        rows = encoder.encode(pa.concat_batches(parts))
        yield Batch(step, rows.x, rows.y, rows.sample_id, np.array(epochs), rows.weight)


def assert_same(found: Batch, wanted: Batch) -> None:
    """Equal in every bit, shapes and dtypes too."""
    assert found.step == wanted.step and found.x.keys() == wanted.x.keys()
    pairs = [(found.x[name], wanted.x[name]) for name in wanted.x]
    pairs += [(getattr(found, name), getattr(wanted, name)) for name in ("y", "sample_ids", "epochs", "weight")]
    for array, other in pairs:
        assert (array is None) == (other is None)
        if array is not None and other is not None:
            assert array.dtype == other.dtype and array.shape == other.shape
            assert array.tobytes() == other.tobytes()
