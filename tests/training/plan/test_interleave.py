"""Lanes that read in several places at once: every position once, and each block still read once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.training.batches.feed import RankFeed
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.order import Interleaving
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.parquet_shard import ParquetShard
from lockstep.training.world import World
from tests.builders.blocks import read_all
from tests.training._tiny import write_table


@given(st.integers(0, 200), st.integers(2, 9), st.integers(1, 12), st.data())
@settings(max_examples=150, deadline=None)
def test_each_position_once_and_any_cut_of_the_order(size: int, parts: int, piece: int, data: st.DataObject) -> None:
    order = Interleaving(size, parts, piece)
    whole = [place for first, last in order.pieces(0, size) for place in range(first, last)]
    assert sorted(whole) == list(range(size))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert [place for first, last in order.pieces(start, stop) for place in range(first, last)] == whole[start:stop]


def test_the_picture_of_the_docstring() -> None:
    pieces = list(Interleaving(16, 2, 3).pieces(0, 16))
    assert pieces == [(0, 3), (8, 11), (3, 6), (11, 14), (6, 8), (14, 16)]


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_a_feed_gives_the_plans_records_and_reads_a_whole_block_once(
    tmp_path: Path, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "d", records={"train": 1000}, shards=1, block_records=50, fmt=fmt)
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    plan = EpochPlan.for_dataset(
        opened.manifest, "train", seed=0, global_batch=10, lanes=2, window_bytes=4000, interleave=4
    )
    rows = read_all(opened.reader, [opened.reader.table.run(n) for n in range(20)])
    of_record = np.asarray(rows.column("sample_id"))
    read: Counter[int] = Counter()
    decode = ParquetShard.decode

    def counted(shard: ParquetShard, data: bytes, start: int, first_record: int, count: int) -> pa.RecordBatch:
        read[first_record // 50] += 1
        return decode(shard, data, start, first_record, count)

    monkeypatch.setattr(ParquetShard, "decode", counted)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
    for batch in feed.batches(0, 100):
        expected: list[int] = []
        for lane in (0, 1):
            for epoch, positions in plan.lane_positions(lane, batch.step * 5, batch.step * 5 + 5):
                for position in positions.tolist():
                    [run] = plan.runs(epoch, position, position + 1)
                    expected.append(int(of_record[run.first_record]))
        assert batch.sample_ids.tolist() == expected
    # Only blocks of Parquet are read whole: kept while lanes are in them, though lanes are in eight in turn.
    assert sum(read.values()) == (20 if fmt == "parquet" else 0)
