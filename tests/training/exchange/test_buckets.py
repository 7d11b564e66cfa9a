"""The flat buffers of the exchange, and the exchange itself without TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError
from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.exchange.agreement import CONTROL_WORDS, Agreement, FedBatches, NonFiniteError, NonFinitePolicy
from lockstep.training.exchange.buckets import ALIGN_BYTES, Layout, Slot, Spec, lay_out
from lockstep.training.exchange.exchange import MAX_SKIPS, Exchange
from tests.training._ring import run_ring

F4, F8 = np.dtype("float32"), np.dtype("float64")


def slots(layout: Layout) -> list[Slot]:
    return [*layout.gradients, *layout.statistics, layout.control]


@pytest.mark.parametrize(
    ("gradients", "statistics", "buckets"),
    [
        ([((3,), F4)], [], 1),  # all in one
        ([((100,), F4), ((200,), F4), ((300,), F4)], [((5,), F4)], 3),  # 1 kB buckets: 300 | 200 | 100
        ([((1000,), F4)], [], 1),  # one tensor larger than a bucket is not cut
        ([((4,), F4), ((4,), F8)], [], 2),  # dtypes are never mixed
        ([((4,), F8)], [((4,), F4)], 2),  # nor with statistics
        ([((), F4), ((0, 3), F4)], [], 1),  # scalars and empty tensors
    ],
)
def test_slots_are_aligned_apart_and_in_reverse(gradients: list[Spec], statistics: list[Spec], buckets: int) -> None:
    layout = lay_out(gradients, statistics, CONTROL_WORDS, bucket_bytes=1024)
    assert len(layout.sizes) == len(layout.dtypes) == buckets
    used = [np.zeros(size, int) for size in layout.sizes]
    for slot, (shape, dtype) in zip(slots(layout), [*gradients, *statistics, ((CONTROL_WORDS,), None)], strict=True):
        assert slot.shape == shape
        assert dtype is None or layout.dtypes[slot.bucket] == dtype
        assert slot.start * layout.dtypes[slot.bucket].itemsize % ALIGN_BYTES == 0
        used[slot.bucket][slot.start : slot.start + slot.size] += 1
    assert max(int(part.max(initial=0)) for part in used) <= 1, "slots overlap"
    order = [(slot.bucket, slot.start) for slot in reversed(layout.gradients)]
    assert order == sorted(order), "the last variable's gradient comes first"
    assert layout.control.bucket == len(layout.sizes) - 1


def step(
    exchange: Exchange, gradients: list[np.ndarray], statistics: list[np.ndarray], loss: float
) -> list[np.ndarray]:
    layout = lay_out(
        [(g.shape, g.dtype) for g in gradients], [(s.shape, s.dtype) for s in statistics], CONTROL_WORDS, 64
    )
    exchange.use(layout, [f"t{i}" for i in range(len(gradients) + len(statistics))])
    for bucket in range(len(layout.sizes)):
        posted = [gradients[i] for i in layout.posted(bucket)]
        if posted:
            exchange.post(bucket, *posted)
    return exchange.finish(np.array(loss, np.float32), *statistics)


def test_shares_weigh_by_rows() -> None:
    """Shares of 1/8, 2/8 and 5/8: the sum is the mean over the global batch, never a mean of means."""
    shares = [1 / 8, 2 / 8, 5 / 8]

    def work(comm: Communicator) -> tuple[list[np.ndarray], Agreement | None]:
        exchange = Exchange(comm, shares[comm.rank])
        rank = comm.rank
        gradients = [np.full((2, 3), rank, np.float32), np.full(40, 10.0 * rank, np.float32)]
        sums: list[np.ndarray] = []
        for _ in range(3):
            sums = step(exchange, gradients, [np.full(4, float(rank), np.float64)], loss=rank)
        exchange.close()
        return [value.copy() for value in sums], exchange.agreement

    for sums, agreement in run_ring(3, work):
        assert [float(value.flat[0]) for value in sums] == [1.5, 15.0, 1.5]
        assert [value.shape for value in sums] == [(2, 3), (40,), (4,)]
        assert agreement == Agreement(step=3, loss=1.5, stop=False, checkpoint=False)


def test_one_wish_is_everyones_decision_once() -> None:
    def work(comm: Communicator) -> list[tuple[bool, bool]]:
        exchange = Exchange(comm, 0.5)
        seen = []
        for number in range(3):
            if number == 1 and comm.rank == 1:
                exchange.want("checkpoint")
            step(exchange, [np.zeros(3, np.float32)], [], 0.0)
            assert exchange.agreement is not None
            seen.append((exchange.agreement.checkpoint, exchange.agreement.stop))
        return seen

    assert run_ring(2, work) == [[(False, False), (True, False), (False, False)]] * 2


@pytest.mark.parametrize(
    ("gradient", "statistic", "loss", "words"),
    [
        (np.inf, 0.0, 0.0, "step 2: t0 is not finite"),
        (0.0, np.nan, 0.0, "step 2: t1 is not finite"),
        (0.0, 0.0, np.nan, "step 2: the loss is not finite"),
        (3e38, 0.0, 0.0, "step 2: t0 is not finite"),  # finite on each rank, but not their sum
    ],
)
def test_what_is_not_finite_stops_every_rank(gradient: float, statistic: float, loss: float, words: str) -> None:
    def work(comm: Communicator) -> str:
        exchange = Exchange(comm, 1.0)
        step(exchange, [np.zeros(3, np.float32)], [np.zeros(2, np.float32)], 0.0)
        mine = comm.rank == 1 or gradient == 3e38
        with pytest.raises(NonFiniteError) as caught:
            part = [np.full(3, gradient if mine else 0, np.float32)], [np.full(2, statistic if mine else 0, np.float32)]
            step(exchange, *part, loss if mine else 0.0)
        return str(caught.value)

    errors = run_ring(2, work)
    assert errors[0] == errors[1]
    assert errors[0].startswith(words)


@pytest.mark.parametrize(
    ("gradient", "statistic", "skipped"),
    [
        (np.inf, 0.0, True),
        (np.inf, np.nan, True),  # an overflow in the forward pass reaches both
        (0.0, np.nan, False),  # no skipped step makes that good
    ],
)
def test_with_loss_scaling_a_gradient_that_is_not_finite_skips(
    gradient: float, statistic: float, skipped: bool
) -> None:
    def work(comm: Communicator) -> bool | str:
        exchange = Exchange(comm, 0.5, scaled_loss=True)
        part = (
            [np.full(3, gradient if comm.rank else 0, np.float32)],
            [np.full(2, statistic if comm.rank else 0, np.float32)],
        )
        try:
            step(exchange, *part, np.nan if skipped else 0.0)
        except NonFiniteError as error:
            return str(error)
        finally:
            exchange.close()
        assert exchange.agreement is not None
        return exchange.agreement.skipped

    for told in run_ring(2, work):
        assert told is True if skipped else str(told).startswith("step 1: t1 is not finite")


def test_ten_steps_in_a_row_are_skipped_and_no_more() -> None:
    """Both ranks' gradients are finite, their sum is not: no rank is named, and a good step begins the count anew."""

    def work(comm: Communicator) -> str:
        exchange = Exchange(comm, 1.0, non_finite=NonFinitePolicy(skips=True))
        skipped: list[bool] = []

        def steps(value: float, count: int) -> None:
            for _ in range(count):
                step(exchange, [np.full(3, value, np.float32)], [], 0.0)
                assert exchange.agreement is not None
                skipped.append(exchange.agreement.skipped)

        steps(3e38, 4)
        steps(1.0, 1)
        steps(3e38, MAX_SKIPS)
        assert skipped == [True] * 4 + [False] + [True] * MAX_SKIPS
        with pytest.raises(NonFiniteError, match="step 16: t0 is not finite, after 10 steps in a row") as caught:
            steps(3e38, 1)
        return str(caught.value)

    first, second = run_ring(2, work)
    assert first == second and "finite on each rank, but not their sum" in first


def test_samples_are_told_of_the_rank_that_had_them() -> None:
    """Rank 1 has lanes 4 to 7 of 5 rows each, of which the message shows 16 samples and its metrics all."""

    def work(comm: Communicator) -> tuple[str, list[Any]]:
        rows: list[Any] = []
        fed = FedBatches(4 * comm.rank, 5)
        fed.add(0, np.arange(20) + 100 * comm.rank)
        fed.add(1, np.zeros(20, np.int64))  # read ahead
        exchange = Exchange(comm, 0.5, non_finite=NonFinitePolicy(fed=fed, report=rows.append))
        with pytest.raises(NonFiniteError) as caught:
            step(exchange, [np.full(3, np.nan if comm.rank else 0, np.float32)], [], 0.0)
        return str(caught.value), rows

    (first, none), (second, rows) = run_ring(2, work)
    assert first == second and not none
    assert f"rank 1: t0, of lanes 4 to 7, samples {100:016x} {101:016x}" in first
    assert "and 4 more, which the rank's log lists" in first
    (row,) = rows
    assert row["samples"] == [f"{number:016x}" for number in range(100, 120)]
    assert (row["kind"], row["step"], row["rank"], row["lanes"]) == ("non_finite", 1, 1, [4, 7])


def test_a_buffer_that_is_still_read_is_never_written() -> None:
    exchange = Exchange(SoloCommunicator(), 1.0)
    (first,) = step(exchange, [np.full(8, 1.0, np.float32)], [], 0.0)
    (second,) = step(exchange, [np.full(8, 2.0, np.float32)], [], 0.0)
    assert first.tolist() == [1.0] * 8, "someone holds it: the next step takes another buffer"
    del second
    (third,) = step(exchange, [np.full(8, 3.0, np.float32)], [], 0.0)
    assert third.tolist() == [3.0] * 8
    assert len(exchange._pools[0]) == 2


def test_a_lost_rank_ends_the_step_with_its_name() -> None:
    def work(comm: Communicator) -> str:
        exchange = Exchange(comm, 0.5)
        if comm.rank == 1:
            return "left"
        with pytest.raises(CommunicationError) as caught:
            step(exchange, [np.zeros(3, np.float32)], [], 0.0)
        return str(caught.value)

    assert "lost rank 1" in run_ring(2, work)[0]
