"""A lane's strips from any place on hold the plan's samples, and entering reads from the window's beginning alone."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.training.batches.assembly import LaneStream, Strip
from lockstep.training.plan.epoch_plan import EpochPlan


def planned(window_records: int = 7) -> EpochPlan:
    return EpochPlan(
        dataset_digest="0" * 64,
        split="train",
        shard_records=(20, 21, 20),
        block_records=8,
        seed=3,
        global_batch=6,
        lanes=3,
        window_records=window_records,
    )


def walk(stream: LaneStream, strips: int) -> list[Strip]:
    return [stream.take() for _ in range(strips)]


@pytest.mark.parametrize(
    ("window", "strip"),
    [(7, 3), (7, 100), (1, 5), (7, 1), (50, 4)],  # the last: windows cut by the span's end
)
def test_strips_hold_the_samples_of_the_plan(window: int, strip: int) -> None:
    plan = planned(window)
    for lane in range(plan.lanes):
        expected = {}
        for sample in range(120):
            ((epoch, positions),) = plan.lane_positions(lane, sample, sample + 1)
            run = plan.runs(epoch, int(positions[0]), int(positions[0]) + 1)[0]
            expected[sample] = (epoch, run.shard, run.first_record)
        for start in (0, 1, 13, 20, 21, 44):
            stream = LaneStream(plan, lane, strip)
            stream.seek(start)
            found: dict[int, tuple[int, int, int]] = {}
            while stream.ready < start + 50:
                at = stream.take()
                assert at.lane == lane and 0 < at.run.count <= strip
                assert sum(piece.count for piece in at.pieces) == at.run.count
                record = at.run.first_record
                for piece in at.pieces:
                    sample_of = np.argsort(plan.window_order(piece.epoch, lane, piece.window))
                    assert len(sample_of) == piece.size
                    for place in range(piece.skip, piece.skip + piece.count):
                        found[piece.first + int(sample_of[place])] = (piece.epoch, at.run.shard, record)
                        record += 1
                # What is ready is there, and never more than what was read.
                assert set(range(start, stream.ready)) <= found.keys() and stream.ready <= stream.read
            assert found == {sample: expected[sample] for sample in found}


def test_a_start_in_the_middle_reads_from_its_window_on() -> None:
    plan = planned()
    stream = LaneStream(plan, 2, 3)
    stream.seek(1_000_000)
    first = stream.peek(0)
    strips = walk(stream, 4)
    assert first == strips[0].run
    assert 1_000_000 - plan.window_records < strips[0].pieces[0].first <= 1_000_000
    assert stream.ready > 1_000_000  # four strips of up to three records, windows of seven


def test_strips_end_with_a_window_or_their_block() -> None:
    plan = planned(2)
    for strip in walk(LaneStream(plan, 0, 5), 12):
        last, end = strip.pieces[-1], strip.run.first_record + strip.run.count
        of_block = end % plan.block_records == 0 or end == plan.shard_records[strip.run.shard]
        assert last.skip + last.count == last.size or of_block


def test_orders_of_several_windows_are_those_of_each() -> None:
    plan, windows = planned(), [(0, 0, 0), (0, 1, 1), (5, 2, 1)]
    orders = plan.window_orders(windows, 7)
    assert orders.dtype == np.int64
    assert [order.tolist() for order in orders] == [plan.window_order(*window).tolist() for window in windows]


def test_what_comes_next_is_told_beyond_the_end_of_an_epoch_that_is_not_the_last() -> None:
    plan, ends = planned(), 0
    stream = LaneStream(plan, 1, 3)
    for _ in range(40):
        epoch = stream.take().pieces[-1].epoch
        read, ready = stream.read, stream.ready
        if plan.lane_at(1, read)[0] > epoch:
            assert stream.peek(ready) is None
            ends += 1
        told = stream.peek(ready + 1)
        assert (stream.read, stream.ready) == (read, ready)  # to look changes nothing
        assert told == stream.take().run
    assert ends > 2
