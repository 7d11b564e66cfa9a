"""The account of benchmarks/effective_time.py: each second once, and the formula where its assumptions hold."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.effective_time import Costs, gaps, restarts, simulate

COSTS = Costs(checkpoint_s=1.0, interval_s=10.0, restart_s=5.0, commit_s=2.0, step_s=0.1)


@pytest.mark.parametrize(
    ("failures", "tail_s", "expected"),
    [
        # useful, repeated, restarts, stalls
        ([25.0], 0.0, (20.0, 3.0, 0.0, 2.0)),  # two checkpoints, the second committed a second ago
        ([23.0], 0.0, (10.0, 11.0, 0.0, 2.0)),  # not committed yet: the one before counts
        ([25.0, 3.0], 6.0, (21.0, 3.0, 8.0, 2.0)),  # killed while it starts: that start is lost
        ([10.5], 0.0, (0.0, 10.0, 0.0, 0.5)),  # within the stall
        ([], 12.0, (11.0, 0.0, 0.0, 1.0)),  # what trains at the end counts without a checkpoint
    ],
)
def test_each_second_is_of_one_kind(failures: list[float], tail_s: float, expected: tuple[float, ...]) -> None:
    found = simulate(COSTS, failures, tail_s=tail_s)
    assert (found.useful_s, found.repeated_s, found.restart_s, found.stall_s) == pytest.approx(expected)
    assert found.total_s == pytest.approx(sum(failures) + tail_s) and found.failures == len(failures)


@pytest.mark.parametrize(("mean_s", "within"), [(14_400.0, 0.001), (1800.0, 0.005), (300.0, 0.03)])
def test_the_simulation_nears_the_formula_where_failures_are_rare(mean_s: float, within: float) -> None:
    costs = Costs(checkpoint_s=0.05, interval_s=60.0, restart_s=7.0, commit_s=1.0, step_s=0.1)
    found = simulate(costs, islice(gaps(3, mean_s), 4000))
    assert found.useful_s / found.total_s == pytest.approx(costs.formula(mean_s), abs=within)
    assert found.total_s / found.failures == pytest.approx(mean_s, rel=0.05)


def test_a_gap_depends_on_its_number_and_the_seed() -> None:
    assert list(islice(gaps(7, 1.0), 5)) == list(islice(gaps(7, 1.0), 5)) != list(islice(gaps(8, 1.0), 5))


def test_a_restart_counts_from_the_last_kill_before_its_first_step() -> None:
    steps = [(0.0, 1, 1), (10.0, 1, 5), (17.0, 2, 3), (30.0, 2, 9), (40.0, 4, 7)]
    assert restarts([11.0, 31.0, 34.0], steps) == pytest.approx((6.0 + 6.0) / 2), "31 was followed by another one"
