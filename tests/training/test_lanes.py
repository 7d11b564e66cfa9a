"""A lane's stream from any place on is the plan's, and enters without reading what lies before."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.training._tiny import write_table
from training.lanes import LaneStream
from training.plan import EpochPlan
from training.positions import Run
from training.reader import OpenSplit, SplitReader

ROWS = {"train": 61}


def planned(root: Path, fmt: str) -> tuple[EpochPlan, SplitReader]:
    manifest = write_table(root, fmt=fmt, records=ROWS, shards=3)
    plan = EpochPlan.for_dataset(manifest, "train", seed=3, global_batch=6, lanes=3, window_bytes=1500)
    assert 3 <= plan.window_records < 20  # several windows in a lane's span, some cut by its end
    return plan, OpenSplit.at(str(root), "train").reader


def ids(plan: EpochPlan, reader: SplitReader, lane: int, start: int, count: int) -> list[int]:
    stream = LaneStream(plan, reader, lane)
    stream.seek(start)
    rows = stream.take(count)
    assert len(rows.epochs) == count
    return [value for batch in rows.batches for value in batch.column("sample_id").to_pylist()]


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_samples_are_those_of_the_plan(tmp_path: Path, fmt: str) -> None:
    plan, reader = planned(tmp_path / "d", fmt)
    for lane in range(plan.lanes):
        expected = [
            reader.read_all(plan.runs(epoch, int(p), int(p) + 1)).column("sample_id")[0].as_py()
            for epoch, positions in plan.lane_positions(lane, 0, 70)
            for p in positions
        ]
        assert ids(plan, reader, lane, 0, 70) == expected
        for start in (1, 13, 20, 21, 44):
            assert ids(plan, reader, lane, start, 26) == expected[start : start + 26]


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_the_size_of_the_takes_changes_nothing(tmp_path: Path, pieces: int) -> None:
    plan, reader = planned(tmp_path / "d", "tfrecord")
    stream = LaneStream(plan, reader, 1)
    parts = [stream.take(pieces) for _ in range(-(-50 // pieces))]
    found = [value for part in parts for batch in part.batches for value in batch.column("sample_id").to_pylist()]
    assert found[:50] == ids(plan, reader, 1, 0, 50)


class Counting(SplitReader):
    """A reader that counts the records it is asked for."""

    asked = 0

    def read(self, run: Run) -> pa.RecordBatch:
        self.asked += run.count
        return super().read(run)


def test_a_start_in_the_middle_reads_one_window_of_the_lane(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path / "d", "tfrecord")
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    reader = Counting(str(tmp_path / "d"), opened.manifest, "train", opened.encoder)
    stream = LaneStream(plan, reader, 2)
    stream.seek(1_000_000)
    stream.take(1)
    assert 0 < reader.asked <= plan.window_records
    stream.seek(1_000_001)
    stream.take(0)
    assert reader.asked <= plan.window_records
