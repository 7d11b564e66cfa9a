"""Where a step's time went, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.comm.base import LinkUse
from lockstep.training.driver.stragglers import times_a_step
from lockstep.training.rank.metrics import PACE_KEPT, PACE_STEPS, StepClock
from lockstep.training.run.metrics import PARTS


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Control:
    """Keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def notify(self, kind: str, **fields: Any) -> None:
        assert kind == "metrics"
        self.rows += fields["rows"]


class Exchange:
    """How long each step waits for its sums."""

    def __init__(self, waits: list[float]) -> None:
        self.waits = waits
        self.asked = 0

    @property
    def waited_s(self) -> float:
        return self.waits.pop(0)

    @property
    def sent_bytes(self) -> int:
        return 1000 * (5 - len(self.waits))

    def links(self) -> dict[int, LinkUse]:
        """Half a second and a megabyte more at each call."""
        self.asked += 1
        return {1: LinkUse(0.5 * self.asked, 1e6 * self.asked)}


def test_a_row_sums_up_its_steps() -> None:
    clock, control, exchange = Clock(), Control(), Exchange([0.05, 0.30])
    client: Any = control
    timer = StepClock(client, 3, exchange, clock)
    timer.batch_is_ready(0)  # read ahead: its step does not wait
    clock.now += 1
    timer.begins()
    clock.now += 0.4
    timer.ends(1)
    assert [row["step"] for row in control.rows] == [1], "a second has passed"
    timer.begins()
    clock.now += 0.25
    timer.batch_is_ready(1)  # a quarter of a second late
    clock.now += 0.75
    timer.ends(2)
    with timer.checkpoint():
        clock.now += 2
    timer.begins()
    timer.batch_is_ready(2)
    timer.flush()
    first, second = control.rows
    assert first == {"kind": "time", "rank": 3, "step": 1, "steps": 1, "starting_s": 1.4, "data_s": 0.0,
                     "compute_s": 0.0, "exchange_s": 0.0, "checkpoint_s": 0.0, "validation_s": 0.0, "other_s": 0.0,
                     "sent_bytes": 1000}  # fmt: skip
    assert times_a_step(first) is None, "a start is no step"
    assert second["data_s"] == 0.25 and second["exchange_s"] == 0.3 and second["compute_s"] == 0.45
    assert len(control.rows) == 2, "a checkpoint alone makes no row"


def test_a_checkpoint_counts_for_the_row_it_lies_in() -> None:
    clock, control = Clock(), Control()
    client: Any = control
    timer = StepClock(client, 0, Exchange([9.0, 9.0]), clock)
    with timer.checkpoint():
        clock.now += 2
    timer.begins()
    clock.now += 0.5
    timer.ends(7)
    (row,) = control.rows
    assert (row["checkpoint_s"], row["starting_s"]) == (2.0, 0.5)
    assert sum(row[part] for part in PARTS) == 2.5
    timer.begins()
    clock.now += 1.5
    timer.ends(8)
    row = control.rows[-1]
    assert row["exchange_s"] == 1.5 and row["compute_s"] == 0.0, "a wait is never longer than its step"


@given(
    steps=st.lists(st.tuples(*[st.integers(0, 3000)] * 4), min_size=1, max_size=30),
    before_ms=st.integers(0, 5000),
    tracing_ms=st.integers(0, 5000),
)
def test_the_parts_are_those_of_a_simulated_run_and_the_start_is_none_of_its_waits(
    steps: list[tuple[int, int, int, int]], before_ms: int, tracing_ms: int
) -> None:
    """Each step waits for its batch, computes, exchanges, and calls callbacks for so many ms; the first also traces
    before it asks for its batch.
    """
    clock, control = Clock(), Control()
    waits = [exchange / 1000 for _, _, exchange, _ in steps]
    client: Any = control
    timer = StepClock(client, 0, Exchange(list(waits)), clock)
    clock.now += before_ms / 1000
    for number, (data, compute, exchange, other) in enumerate(steps):
        timer.begins()
        clock.now += (data + (0 if number else tracing_ms)) / 1000
        timer.batch_is_ready(number)
        clock.now += (compute + exchange) / 1000
        timer.ends(number + 1)
        clock.now += other / 1000
    timer.flush()
    found = {part: sum(row[part] for row in control.rows) for part in PARTS}
    first, later = steps[0], steps[1:]
    assert found["starting_s"] == pytest.approx((before_ms + tracing_ms + sum(first[:3])) / 1000, abs=1e-4)
    for position, part in enumerate(("data_s", "compute_s", "exchange_s")):
        assert found[part] == pytest.approx(sum(step[position] for step in later) / 1000, abs=1e-3)
    assert sum(found.values()) <= clock.now - 100 + 1e-3


def test_a_validation_after_the_last_step_is_not_lost() -> None:
    clock, control = Clock(), Control()
    client: Any = control
    timer = StepClock(client, 0, Exchange([0.0]), clock)
    timer.begins()
    clock.now += 1.5
    timer.ends(7)
    with timer.validation():
        clock.now += 4
    timer.flush()
    of_step, of_validation = control.rows
    assert (of_step["step"], of_step["steps"], of_step["validation_s"]) == (7, 1, 0.0)
    assert (of_validation["step"], of_validation["steps"], of_validation["validation_s"]) == (7, 0, 4.0)


def test_short_steps_are_reported_ten_at_a_time_and_long_ones_each() -> None:
    """Steps of 5 ms: a slow rank must be named within 50 of them, a quarter of a second."""
    clock, control = Clock(), Control()
    client: Any = control

    def paces(steps: int, step_s: float, num_ranks: int) -> list[dict[str, Any]]:
        control.rows = []
        timer = StepClock(client, 0, Exchange([0.001] * steps), clock, num_ranks=num_ranks)
        for step in range(1, steps + 1):
            timer.begins()
            clock.now += step_s
            timer.ends(step)
            clock.now += 0.002
        return [row for row in control.rows if row["kind"] == "pace"]

    rows = paces(40, 0.005, 2)
    assert [(row["step"], row["steps"]) for row in rows] == [(10, 10), (20, 10), (30, 10), (40, 10)]
    assert rows[0]["times"] == [[0, 4000, 1000, 0], *[[0, 4000, 1000, 2000]] * (PACE_STEPS - 1)]
    assert [row["links"] for row in rows] == [{"1": [0.0, 0.0]}, *[{"1": [0.05, 1e5]}] * 3]
    assert [row["steps"] for row in paces(3, 2.0, 2)] == [1, 1, 1]
    many = paces(100, 0.005, 300)  # 300 ranks: each reports after 0.3 s, the last steps
    assert [row["steps"] for row in many] == [44, 43] and len(many[0]["times"]) == PACE_KEPT
    assert paces(40, 0.005, 1) == [], "a rank without others is not compared"
