"""When checkpoints are begun, on all ranks alike, and what is done while one is in flight. No Keras, no ranks."""

from __future__ import annotations

import math
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import DataError, StorageTimeoutError
from lockstep.training.comm import SoloCommunicator
from lockstep.training.config import TrainConfig
from lockstep.training.exchange.agreement import Agreement, NonFiniteError
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.rank.checkpointing import (
    FIRST_S,
    MEAN_TIME_BETWEEN_FAILURES_S,
    Checkpoints,
    Schedule,
    best_interval_s,
)
from lockstep.training.rank.metrics import Saved
from lockstep.training.rank.saver import InFlight, Report
from lockstep.training.rules import CheckpointEvery


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (200, CheckpointEvery(steps=200)),
        ("200", CheckpointEvery(steps=200)),
        ("60s", CheckpointEvery(seconds=60.0)),
        ("0.5s", CheckpointEvery(seconds=0.5)),
        ("auto", CheckpointEvery()),
        *((wrong, None) for wrong in (0, -1, "0", "", "0s", "60 s", "1m", "s", "inf s", "infs", "1e3s", "Auto", "²")),
        (True, None),
        (1.5, None),
    ],
)
def test_what_may_be_asked_for(text: Any, expected: CheckpointEvery | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="or auto"):
            CheckpointEvery.parse(text)
    else:
        assert CheckpointEvery.parse(text) == expected


@given(st.floats(1e-3, 100.0), st.floats(60.0, 1e7))
def test_the_interval_loses_least(cost_s: float, between_s: float) -> None:
    """What is lost a second: the cost at each interval, and at a failure half an interval on average."""

    def lost(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / (2 * between_s)

    best = best_interval_s(cost_s, between_s)
    assert lost(best) <= min(lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    # What the default's comment says of a mean time that is 6 times off.
    assert lost(best_interval_s(cost_s, between_s * 6)) / lost(best) == pytest.approx(1.43, abs=0.005)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_auto_follows_what_a_checkpoint_costs() -> None:
    clock = Clock()
    schedule = Schedule(CheckpointEvery(), clock)
    assert schedule.interval_s == FIRST_S and not schedule.due_at(200)
    for _ in range(10):
        clock.now += 1.0
        schedule.step_ends(in_flight=False)
    assert not schedule.wishes
    clock.now = 100.0 + FIRST_S
    assert schedule.wishes
    schedule.begun(0.1)
    assert not schedule.wishes
    for took in (1.25, 1.1, 0.9):  # a quarter of a second slower beside the writing, in all
        clock.now += took
        schedule.step_ends(in_flight=True)
    assert schedule.committed() == pytest.approx(0.35)
    assert schedule.interval_s == pytest.approx(math.sqrt(2 * 0.35 * MEAN_TIME_BETWEEN_FAILURES_S))
    clock.now += schedule.interval_s - 3.25 - 0.01
    assert not schedule.wishes
    clock.now += 0.02
    assert schedule.wishes
    schedule.skipped()
    assert not schedule.wishes


def test_a_run_without_another_step_has_no_slower_one() -> None:
    schedule = Schedule(CheckpointEvery(seconds=5.0), Clock())
    schedule.begun(0.0)
    schedule.step_ends(in_flight=True)
    assert schedule.committed() == 0.0
    assert schedule.interval_s == 5.0


class Disk:
    """A Saver whose writings end when told."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.begun: list[tuple[int, bool]] = []
        self.done = True
        self.error: Exception | None = None
        self.taken = True

    @property
    def in_flight(self) -> bool:
        return not self.done

    def save(self, progress: Any, *, in_epoch: bool = False) -> None:
        assert self.taken, "one at a time"
        self.last_step, self.done, self.taken = progress.step, False, False
        self.begun.append((progress.step, in_epoch))

    def look(self) -> Saved | None:
        if self.error:
            raise self.error
        if self.taken or not self.done:
            return None
        self.taken = True
        return Saved(self.last_step or 0, 10, 0.0)

    def wait(self, _deadline_s: float) -> Saved | None:
        self.done = True
        return self.look()


class Quiet:
    """What takes anything and does nothing."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def checkpoint(self, saved: Saved | None = None, *more: Any) -> Any:
        if saved is not None:
            self.rows.append((saved.step, more[2]))
        return nullcontext()

    def flush(self) -> None:
        """Nothing."""

    def beat(self, _step: int, _phase: str) -> None:
        """Nothing."""

    def compare(self, _step: int) -> None:
        """Nothing."""


class Ranks:
    """Some ranks in one thread: words are added up as the exchange does it."""

    def __init__(self, num_ranks: int, every: int | str) -> None:
        config = TrainConfig(
            datasets=("d",),
            run="/r",
            model="m",
            num_ranks=num_ranks,
            global_batch=8,
            epochs=1,
            checkpoint_every=every,
        )
        self.step = 0
        self.exchanges, self.disks = (
            [Exchange(SoloCommunicator()) for _ in range(num_ranks)],
            [Disk() for _ in range(num_ranks)],
        )
        self.rows = Quiet()
        reports: list[Any] = [self.rows, *[None] * num_ranks]
        quiet: Any = Quiet()

        def checkpoints(rank: int, disk: Any, words: Any) -> Checkpoints:
            return Checkpoints(disk, words, quiet, config, quiet, quiet, reports[rank])

        self.ranks = [checkpoints(rank, self.disks[rank], self.exchanges[rank]) for rank in range(num_ranks)]

    def go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            wanted = set().union(*(exchange._wanted for exchange in self.exchanges))
            for exchange in self.exchanges:
                exchange._wanted.clear()
            flags: dict[str, Any] = {flag: flag in wanted for flag in ("stop", "checkpoint", "busy")}
            for rank in self.ranks:
                rank.step_ends()
                progress: Any = type("Progress", (), {"step": self.step})()
                rank.begin_if_due(Agreement(self.step, 0.5, **flags), progress, in_epoch=True)

    def begun(self) -> list[int]:
        """The steps of the checkpoints begun, the same on all ranks."""
        assert len({tuple(disk.begun) for disk in self.disks}) == 1
        return [step for step, _ in self.disks[0].begun]


def test_one_that_is_due_while_any_rank_is_busy_is_skipped_by_all() -> None:
    ranks = Ranks(3, 5)
    ranks.go(5)
    assert ranks.begun() == [5]
    ranks.disks[0].done = ranks.disks[2].done = True  # rank 1 alone still writes
    ranks.go(5)
    assert ranks.begun() == [5]
    ranks.disks[1].done = True
    ranks.go(5)
    assert ranks.begun() == [5, 15]
    for disk in ranks.disks:
        disk.done = True
    ranks.go(1)
    assert ranks.rows.rows == [(5, 0), (15, 1)], "10 is counted with the next one"


def test_one_that_ended_during_the_step_counts_as_in_flight_on_all_ranks() -> None:
    """Its rank had said so in the words of the step: all must decide alike."""
    ranks = Ranks(2, 5)
    ranks.go(9)
    for disk in ranks.disks:
        disk.done = True
    ranks.go(1)
    assert ranks.begun() == [5]
    ranks.go(5)
    assert ranks.begun() == [5, 15]


def test_a_wish_of_one_rank_holds_until_it_is_met() -> None:
    ranks = Ranks(2, 100)
    ranks.exchanges[1].want("checkpoint")
    ranks.go(2)
    assert ranks.begun() == [1]
    ranks.exchanges[1].want("checkpoint")
    ranks.go(5)
    assert ranks.begun() == [1]
    for disk in ranks.disks:
        disk.done = True
    ranks.go(3)
    assert len(ranks.begun()) == 2
    for disk in ranks.disks:
        disk.done = True
    ranks.go(20)
    assert len(ranks.begun()) == 2, "once"


def test_the_clock_of_rank_0_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, "10s")
    clocks = [Clock(), Clock()]
    for rank, clock in zip(ranks.ranks, clocks, strict=True):
        monkeypatch.setattr(rank._schedule, "_now", clock)
        rank._schedule._begun = 100.0
    clocks[1].now = 1000.0  # of another host
    ranks.go(5)
    assert ranks.begun() == []
    clocks[0].now += 10.5
    ranks.go(1)
    assert ranks.begun() == []
    ranks.go(1)
    assert ranks.begun() == [7], "wished at the end of step 6, agreed with step 7"
    for disk in ranks.disks:
        disk.done = True
    ranks.go(5)
    assert ranks.begun() == [7]
    clocks[0].now += 10.5
    ranks.go(2)
    assert ranks.begun() == [7, 14]
    for disk in ranks.disks:
        disk.done = True
    ranks.go(1)
    assert ranks.rows.rows == [(7, 0), (14, 0)], "a wish that is met is not made again"


def test_a_checkpoint_that_the_driver_asks_for_follows_the_one_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, "auto")
    for rank in ranks.ranks:
        monkeypatch.setattr(rank._schedule, "_now", Clock())  # no time passes
    ranks.ranks[0].ask()
    ranks.go(1)
    assert ranks.begun() == [1]
    ranks.ranks[1].ask()  # the same request, which it heard later
    ranks.go(1)
    ranks.ranks[0].ask()
    ranks.go(3)
    assert ranks.begun() == [1]
    for disk in ranks.disks:
        disk.done = True
    ranks.go(2)
    assert ranks.begun() == [1, 7]
    for disk in ranks.disks:
        disk.done = True
    ranks.go(9)
    assert ranks.begun() == [1, 7], "one for each request"


def test_an_error_of_the_writing_ends_the_next_step() -> None:
    ranks = Ranks(2, 5)
    ranks.go(5)
    ranks.disks[1].error = DataError("the disk is full")
    with pytest.raises(DataError, match="disk is full"):
        ranks.go(1)


@pytest.mark.parametrize("last", [10, 12])
def test_the_end_of_a_run_waits_and_writes_what_is_missing(last: int) -> None:
    ranks = Ranks(1, 10)
    ranks.go(last)
    progress: Any = type("Progress", (), {"step": last})()
    ranks.ranks[0].finish(progress)
    assert ranks.begun() == ([10] if last == 10 else [10, 12])
    assert ranks.disks[0].done and ranks.disks[0].taken


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (NonFiniteError("the loss"), True),
        (RuntimeError("a rank died"), False),
        (DataError("a bad image"), False),  # of one rank: the others' parts never come, and the driver waits to hear it
    ],
)
def test_a_run_that_ends_alike_on_all_ranks_keeps_what_is_in_flight(error: Exception, waits: bool) -> None:
    ranks = Ranks(1, 5)
    ranks.go(5)
    ranks.ranks[0].abandon(error)
    assert ranks.disks[0].done is waits
    ranks.disks[0].error = OSError("the disk is full")
    ranks.ranks[0].abandon(error)  # the first error stands


def test_work_in_flight_gives_its_result_once() -> None:
    flight: InFlight[int] = InFlight()
    assert flight.look() is None and flight.wait(1.0) is None and not flight.busy
    go_on = threading.Event()

    def work(report: Report) -> int:
        report("reading the news")
        assert go_on.wait(10)
        return 7

    flight.begin("rank 3's part", work)
    assert flight.busy and flight.look() is None
    with pytest.raises(StorageTimeoutError, match="rank 3's part did not end") as caught:
        flight.wait(0.05)
    assert "reading the news" in caught.value.got
    go_on.set()
    assert flight.wait(120) == 7
    assert flight.look() is None and not flight.busy


def test_work_in_flight_gives_its_error_once() -> None:
    flight: InFlight[int] = InFlight()

    def fails(_report: Report) -> int:
        raise DataError("changed")

    flight.begin("it", fails)
    end = time.monotonic() + 120
    while flight.busy and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(DataError, match="changed"):
        flight.look()
    assert flight.look() is None
