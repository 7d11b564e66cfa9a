"""Which rank the others wait for: tables, and simulated runs with the noise of real steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.training.driver.stragglers import (
    NETWORK,
    OWN,
    REST_S,
    SLOW,
    WELL,
    Straggler,
    Stragglers,
    find_straggler,
    where,
)
from lockstep.training.rank.metrics import PACE_KEPT, PACE_STEPS

TIMES: dict[str, Any] = {
    "data_s": 0.0, "compute_s": 0.1, "other_s": 0.0, "exchange_s": 0.1, "own_s": 0.1, "step_s": 0.2, "links": {}
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "rows", "named", "expected"),
    [
        ([0.1, 0.1, 0.1], [4, 4, 4], None, None),
        ([0.1, 0.2, 0.1], [4, 4, 4], None, 1),
        ([0.1, 0.1 * SLOW - 0.001, 0.1], [4, 4, 4], None, None),  # not slow enough to be named
        ([0.1, 0.1 * SLOW - 0.001, 0.1], [4, 4, 4], 1, 1),  # but enough to stay named
        ([0.1, 0.1 * WELL - 0.001, 0.1], [4, 4, 4], 1, None),
        ([0.1, 0.2, 0.1], [4, 8, 4], None, None),  # it has twice the rows
        ([0.1, 0.2, 0.1], [2, 1, 2], None, 1),
        ([0.1, 0.1, 0.06], [4, 4, 1], None, None),  # many times the others' time a row, and never waited for
        ([0.004, 0.006, 0.004], [4, 4, 4], None, None),  # too short to matter in a step of 200 ms
        ([0.21, 0.2, 0.1, 0.1, 0.1], [4] * 5, 1, 1),  # two slow ranks do not take turns
        ([0.2], [4], None, None),
    ],
)
def test_a_rank_is_named_by_its_own_time(
    own: Sequence[float], rows: Sequence[int], named: int | None, expected: int | None
) -> None:
    times = [[{**TIMES, "compute_s": seconds, "own_s": seconds}] for seconds in own]
    found = find_straggler(times, rows, named)
    assert (None if found is None else found.rank) == expected


@pytest.mark.parametrize("part", OWN)
def test_what_is_slow_is_the_part_with_the_largest_excess(part: str) -> None:
    slow = {**TIMES, part: TIMES[part] + 0.15, "own_s": 0.25}
    assert find_straggler([[TIMES], [slow], [TIMES]], [1, 1, 1]) == Straggler(1, OWN[part], 0.25, 0.1)
    note = Straggler(1, OWN[part], 0.25, 0.1).note("host-b")
    assert note.startswith("rank 1 on host-b is slow: 250.0 ms of its own a step, ")
    assert f"most of it {where(OWN[part])}; next: " in note and "for between" not in note


Links = dict[int, dict[int, tuple[float, float]]]
MB = 1e6


@pytest.mark.parametrize(
    ("links", "exchange_s", "expected"),
    [
        # Rings of three: rank 1 sends slowly; in both directions; and all of them.
        ({0: {1: (0.01, MB)}, 1: {2: (0.08, MB)}, 2: {0: (0.01, MB)}}, 0.1, 1),
        ({0: {1: (0.08, MB)}, 1: {2: (0.08, MB)}, 2: {0: (0.01, MB)}}, 0.1, 1),
        ({0: {1: (0.08, MB)}, 1: {2: (0.08, MB)}, 2: {0: (0.08, MB)}}, 0.1, None),
        # Two ranks: only the direction that is slow says which one it is.
        ({0: {1: (0.01, MB)}, 1: {0: (0.08, MB)}}, 0.1, 1),
        ({0: {1: (0.08, MB)}, 1: {0: (0.08, MB)}}, 0.1, None),
        # Rank 1 sends eight times as much as the others, at their rate: a tree's root.
        ({0: {1: (0.01, MB)}, 1: {0: (0.04, 4 * MB), 2: (0.04, 4 * MB)}, 2: {1: (0.01, MB)}}, 0.1, None),
        # A slow link that hides behind the computation, and none.
        ({0: {1: (0.01, MB)}, 1: {2: (0.08, MB)}, 2: {0: (0.01, MB)}}, 0.005, None),
        ({}, 0.1, None),
        # Ranks 0 and 2 speak for two hosts of two.
        ({0: {2: (0.01, MB)}, 2: {0: (0.08, MB)}}, 0.1, 2),
    ],
)
def test_a_network_is_named_by_the_time_of_its_bytes(links: Links, exchange_s: float, expected: int | None) -> None:
    ranks = max(3, *links, 0) + 1 if 2 in links and len(links) == 2 else max(2, len(links))
    times = [[{**TIMES, "exchange_s": exchange_s, "links": links.get(rank, {})}] for rank in range(ranks)]
    found = find_straggler(times, [1] * ranks)
    assert (None if found is None else (found.rank, found.what)) == (expected and (expected, NETWORK))
    if found is not None:
        assert "most of it for network; next: look at the link" in found.note("host-b")


def test_a_rank_that_computes_for_long_is_not_named_for_its_network() -> None:
    """While it does, what the rank before it has sent waits there, unacknowledged."""
    waits = {**TIMES, "compute_s": 0.05, "own_s": 0.05, "exchange_s": 0.15, "links": {1: (0.15, MB)}}
    slow = {**TIMES, "compute_s": 0.19, "own_s": 0.19, "exchange_s": 0.01, "links": {0: (0.01, MB)}}
    found = find_straggler([[waits], [slow]], [1, 1])
    assert found is not None and (found.rank, found.what) == (1, "compute")


def simulate(
    ranks: int, steps: int, seed: int, slow: Callable[[int, int], float], in_a_row: int = 1
) -> list[tuple[int, Straggler]]:
    """(step, rank named) of a run in lockstep, `in_a_row` steps a row; `slow(step, rank)` multiplies a rank's own time.

    Noise of each step: 15 % (lognormal), one step in fifty takes three times as long, bursts of five steps that take
    1.5 times as long on one rank, and a lasting difference between ranks of 3 %.
    """
    random = np.random.default_rng(seed)
    lasting = 1 + random.normal(0, 0.03, ranks).clip(-0.06, 0.06)
    clock = [0.0]
    watch, found = Stragglers([8] * ranks, lambda: clock[0]), []
    waiting: list[list[list[int]]] = [[] for _ in range(ranks)]
    burst_rank, burst_until = 0, 0
    for step in range(1, steps + 1):
        own = lasting * random.lognormal(0, 0.15, ranks)
        own *= np.where(random.random(ranks) < 0.02, 3.0, 1.0)
        if random.random() < 0.01:
            burst_rank, burst_until = int(random.integers(ranks)), step + 5
        if step < burst_until:
            own[burst_rank] *= 1.5
        own *= [slow(step, rank) for rank in range(ranks)]
        clock[0] += own.max() + 0.05
        parts = [[0.1 * one, 0.9 * one, own.max() - one + 0.05, 0.0] for one in own]
        for rank, each in enumerate(parts):
            waiting[rank].append([int(1e6 * seconds) for seconds in each])
        if step % in_a_row:
            continue
        for rank in random.permutation(ranks).tolist():
            row = {"rank": rank, "step": step, "steps": in_a_row, "times": waiting[rank][-PACE_KEPT:], "links": {}}
            waiting[rank] = []
            if (named := watch.add(row)) is not None:
                found.append((step, named))
    return found


@settings(max_examples=6, deadline=None)
@given(ranks=st.integers(2, 12), seed=st.integers(0, 2**32))
@example(ranks=5, seed=48)  # one comparison of 1,000 finds a rank slow
def test_without_a_straggler_nothing_is_noted_in_1000_steps(ranks: int, seed: int) -> None:
    assert simulate(ranks, 1000, seed, lambda step, rank: 1.0) == []


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(2, 12),
    seed=st.integers(0, 2**32),
    begins=st.sampled_from([0, 100, 105]),
    in_a_row=st.sampled_from([1, PACE_STEPS]),
    data=st.data(),
)
def test_a_rank_on_half_a_core_is_named_once_within_50_steps(
    ranks: int, seed: int, begins: int, in_a_row: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, ranks - 1))
    found = simulate(ranks, 200, seed, lambda step, rank: 2.0 if rank == held and step > begins else 1.0, in_a_row)
    assert [named.rank for _, named in found] == [held]
    assert begins < found[0][0] <= begins + 50


@pytest.mark.parametrize("in_a_row", [1, PACE_STEPS])
def test_a_rank_that_is_stopped_for_half_of_each_100_ms_is_named_within_50_short_steps(in_a_row: int) -> None:
    """As a limit of half a processor does: most of its steps of 5 ms are as short as the others'."""
    found = simulate(
        3, 200, 3, lambda step, rank: 11.0 if rank == 1 and step > 100 and step % 10 == 3 else 1.0, in_a_row
    )
    assert [named.rank for _, named in found] == [1]
    assert 100 < found[0][0] <= 150


def test_one_long_step_is_no_slow_rank() -> None:
    assert simulate(3, 200, 3, lambda step, rank: 40.0 if rank == 1 and step == 100 else 1.0) == []


def test_a_rank_that_recovers_is_named_again_when_it_becomes_slow_again() -> None:
    found = simulate(4, 600, 7, lambda step, rank: 2.0 if rank == 2 and (step < 100 or step > 400) else 1.0)
    assert [(named.rank, step < 50 or 400 < step < 450) for step, named in found] == [(2, True), (2, True)]


def test_ranks_that_are_slow_in_turn_on_a_busy_host_are_not_named_in_turn() -> None:
    """Each is slow for 60 steps of 0.1 s: long enough to be named, and well again before one may be named again."""
    found = simulate(2, 300, 5, lambda step, rank: 0.1 if step // 60 % 2 == rank else 0.05)
    assert len(found) == 1


def test_a_rank_that_stays_slow_is_named_after_another_one_was() -> None:
    found = simulate(2, 1000, 5, lambda step, rank: 0.1 if rank == (step > 50) else 0.05)
    assert [named.rank for _, named in found] == [0, 1] and found[1][0] > 400, "when the first note has rested"


def test_rows_of_many_steps_count_once_and_only_when_all_ranks_have_reported() -> None:
    clock = [0.0]
    watch = Stragglers([1, 1], lambda: clock[0])
    fast, slow = ([[0, 1000 * compute_ms, 0, 0]] * PACE_STEPS for compute_ms in (20, 40))

    def told(row: int, of_second: list[list[int]]) -> Straggler | None:
        head = {"step": PACE_STEPS * row, "steps": PACE_STEPS, "links": {}}
        assert watch.add({**head, "rank": 0, "times": fast}) is None
        return watch.add({**head, "rank": 1, "times": of_second})

    found = [told(row, slow) for row in range(1, 6)]
    assert [one is not None for one in found] == [False, False, True, False, False], "30 steps of 10 a row"
    assert found[2] is not None and (found[2].own_s, found[2].others_s) == (0.04, 0.02)
    # Well again, and slow again: it is named after a minute, then after two.
    for again in (False, True, False, False, False, True):
        assert [told(row, fast) for row in range(3)] == [None] * 3
        clock[0] += REST_S / 2 + 1
        assert any(told(row, slow) for row in range(5)) == again
