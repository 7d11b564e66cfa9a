"""A lane's windows from any place on are the plan's, and entering reads no more than the strips of one window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from training.lanes import LaneStream, LaneWindow
from training.plan import EpochPlan
from training.positions import Run
from training.units import Unit


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


class Place(Unit):
    """Stands for the unit of a run: its rows are known by number."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run


def walk(stream: LaneStream, asked: list[Run] | None = None) -> Iterator[tuple[LaneWindow, list[tuple[int, int]]]]:
    """Windows without end, each with the records (shard, number) that it is made of."""
    while True:
        window, runs = stream.window(), stream.missing()
        if asked is not None:
            asked += runs
        parts = stream.take([(Place(run), 100) for run in runs])
        records = []
        for part in parts:
            assert isinstance(part.unit, Place)
            first = part.unit.run.first_record + part.row - 100
            records += [(part.unit.run.shard, first + number) for number in range(part.count)]
        yield window, records


@pytest.mark.parametrize(
    ("window", "strip", "whole"),
    [(7, 3, False), (7, 100, False), (1, 5, False), (7, 1, True), (50, 4, False)],  # the last: windows cut by the span
)
def test_windows_are_those_of_the_plan(window: int, strip: int, whole: bool) -> None:
    plan = planned(window)
    for lane in range(plan.lanes):
        for start in (0, 1, 13, 20, 21, 44):
            stream = LaneStream(plan, lane, strip, whole=whole)
            stream.seek(start)
            found: list[tuple[int, int, int]] = []
            for at, records in walk(stream):
                assert len(records) == at.count and at.first <= max(start, at.first)
                order = plan.window_order(at.epoch, lane, at.number)
                found += [(at.epoch, *records[place]) for place in order][max(0, start - at.first) :]
                if len(found) >= 50:
                    break
            expected = []
            for epoch, positions in plan.lane_positions(lane, start, start + 50):
                for position in positions.tolist():
                    run = plan.runs(epoch, position, position + 1)[0]
                    expected.append((epoch, run.shard, run.first_record))
            assert found[:50] == expected


def test_a_start_in_the_middle_asks_for_one_window() -> None:
    plan, asked = planned(), list[Run]()
    stream = LaneStream(plan, 2, 3)
    stream.seek(1_000_000)
    next(walk(stream, asked))
    assert sum(run.count for run in asked) < plan.window_records + 3  # strips of three records: two more at most
    assert all(run.count <= 3 for run in asked)


def test_orders_of_several_windows_are_those_of_each() -> None:
    plan, windows = planned(), [(0, 0, 0), (0, 1, 1), (5, 2, 1)]
    orders = plan.window_orders(windows, 7)
    assert orders.dtype == np.int64
    assert [order.tolist() for order in orders] == [plan.window_order(*window).tolist() for window in windows]
