"""What bounds a run: the rules, from measurements made up to the verdict; rounds put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.profiling.verdict import (
    CACHED_ALONE,
    COLD_ALONE,
    COMPUTING_SHARE,
    KINDS,
    PARTS,
    Measured,
    Setting,
    Spread,
    advice,
    judge,
    put_together,
)

ALONE = (CACHED_ALONE, COLD_ALONE)
SETTING = Setting(
    num_ranks=2,
    global_batch=128,
    cores=1,
    local=False,
    cache=False,
    read_ahead_bytes=64 << 20,
    micro_batches=1,
    precision="float32",
    batchnorm="ghost",
    canonical=False,
    augment="",
    decodes=False,
    wide=(),
)


def steps(
    synthetic: tuple[float, ...],
    cached: tuple[float, ...],
    cold: tuple[float, ...],
    exchange: float = 0.0,
    alone: tuple[float, float] = (50.0, 100.0),
) -> Measured:
    """Of one rank: each round's time of a step, the exchange's part of a synthetic one, batches alone."""
    rounds = [
        {
            **{
                kind: {"steps": 1, "seconds": seconds, "data_s": 0.0, "exchange_s": exchange}
                for kind, seconds in zip(KINDS, found, strict=True)
            },
            **{
                kind: {"steps": 1, "seconds": seconds, "cpu_s": 0.1} for kind, seconds in zip(ALONE, alone, strict=True)
            },
        }
        for found in zip(synthetic, cached, cold, strict=True)
    ]
    return put_together([rounds])


def same(seconds: float, rounds: int = 5) -> tuple[float, ...]:
    return (seconds,) * rounds


@pytest.mark.parametrize(
    ("measured", "bound", "gain"),
    [
        (steps(same(90), same(91), same(92)), "computing", 1 / (1 - 90 / 92 / 2)),
        (steps(same(50), same(50), same(100)), "storage", 2.0),
        (steps(same(50), same(100), same(100)), "input", 2.0),
        (steps(same(100), same(100), same(100), exchange=50), "exchange", 2.0),
        # Both are over their threshold: the larger one counts, and what it hides comes up when it is gone.
        (steps(same(50), same(70), same(100)), "storage", 1 / 0.7),
        (steps(same(50), same(80), same(100)), "input", 1 / 0.7),
        (steps(same(60), same(60), same(70), exchange=25), "exchange", 70 / 45),
        # Exactly at its threshold.
        (steps(same(75), same(75), same(100)), "computing", 1 / (1 - 0.75 / 2)),
        (steps(same(85), same(90), same(100), exchange=20), "exchange", 1.25),
        # Nothing reaches its threshold, but all together they leave too little for computing.
        (steps(same(85), same(93), same(100), exchange=15), "nothing clear", 1.0),
        # Cold steps faster than cached ones, these faster than synthetic ones: noise, and no negative share.
        (steps(same(100), same(98), same(96)), "computing", 2.0),
        # Medians 20 apart, but in two rounds of five the other way round: nobody can tell.
        (steps(same(80), (80, 80, 80, 110, 110), (100, 100, 100, 90, 90)), "computing", 1 / (1 - 1 / 2)),
        # One round of five was disturbed: it counts no more than the others.
        (steps(same(50), same(50), (100, 100, 100, 100, 900)), "storage", 2.0),
        # Steps lose 50 to data that takes 2 alone: another program takes the time, at most 3 * 2 are its.
        (steps(same(50), same(100), same(100), alone=(2, 2)), "computing", 1 / (1 - 0.94 / 2)),
        (steps(same(90), same(90), same(120), alone=(2, 2)), "computing", 1 / (1 - 0.95 / 2)),
        # Synthetic steps were disturbed in all rounds, cached ones not: no storage is seen, and none is made up.
        (steps(same(100), same(60), same(100)), "computing", 2.0),
        # Cached steps were disturbed in all rounds, cold ones not: data cannot cost more than cold steps lose.
        (steps(same(98), same(140), same(100)), "computing", 1 / (1 - 0.98 / 2)),
        # The rounds' quartiles are 0.5 of the median apart: a storage of 0.2 is not seen, one of 0.6 is.
        (steps((60, 70, 80, 110, 120), (60, 70, 80, 110, 120), (75, 87, 100, 137, 150)), "nothing clear", 1.0),
        (steps((30, 35, 40, 55, 60), (30, 35, 40, 55, 60), (75, 87, 100, 137, 150)), "storage", 2.5),
        # All the time goes to storage: no division by nothing, and no promise without end.
        (steps(same(1e-9), same(1e-9), same(100)), "storage", 100.0),
    ],
)
def test_what_bounds_it(measured: Measured, bound: str, gain: float) -> None:
    verdict = judge(measured)
    assert verdict.bound_by == bound, verdict
    assert verdict.gain_at_most == pytest.approx(gain, rel=0.02)
    assert sum(verdict.shares.values()) == pytest.approx(1)
    assert advice(verdict, measured, SETTING)


@pytest.mark.parametrize(
    ("measured", "bound", "costs"),
    [
        (steps(same(88), same(100), same(100)), "computing", {"input": 1 / 0.88}),
        (steps(same(90), same(90), same(100)), "computing", {"storage": 1 / 0.9}),  # exactly at its threshold
        (steps(same(100), same(100), same(100), exchange=20), "computing", {"exchange": 1.25}),
        (steps(same(91), same(100), same(100)), "computing", {}),
        (steps(same(50), same(70), same(100)), "storage", {"input": 1 / 0.8}),
    ],
)
def test_what_also_costs_is_named_beside_the_largest_share(
    measured: Measured, bound: str, costs: dict[str, float]
) -> None:
    """At 88 % computing, data of 12 % are no bound: without them the run is 1.14 times as fast, at most."""
    verdict = judge(measured)
    assert verdict.bound_by == bound
    assert verdict.costs == pytest.approx(costs)
    assert not costs or all("fast enough" not in line for line in advice(verdict, measured, SETTING))


@given(
    st.lists(st.tuples(*[st.floats(1e-6, 1e3)] * 3), min_size=1, max_size=7),
    st.floats(0, 1e3),
    st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)),
)
def test_shares_make_up_the_whole_whatever_was_measured(
    rounds: list[tuple[float, float, float]], exchange: float, alone: tuple[float, float]
) -> None:
    kinds = [tuple(found) for found in zip(*rounds, strict=True)]
    measured = steps(kinds[0], kinds[1], kinds[2], exchange, alone)
    verdict = judge(measured)
    assert sum(verdict.shares.values()) == pytest.approx(1)
    assert all(0 <= verdict.shares[part] <= 1 for part in PARTS)
    assert 1 <= verdict.gain_at_most <= 100
    if verdict.bound_by == "computing":
        assert verdict.shares["computing"] >= COMPUTING_SHARE
    assert all(advice(verdict, measured, SETTING))


@pytest.mark.parametrize(
    ("measured", "changed", "first"),
    [
        # Alone the storage is fast enough: bytes are fetched too late. More of them cannot be had where it is not.
        (steps(same(50), same(50), same(100), alone=(1, 20)), {}, "--read-ahead-bytes 268435456"),
        (steps(same(50), same(50), same(100), alone=(1, 90)), {}, "--cache DIR"),
        (steps(same(50), same(50), same(100), alone=(1, 20)), {"local": True}, "--cache DIR"),
        (steps(same(50), same(50), same(100), alone=(1, 90)), {"cache": True}, "The storage delivers fewer bytes"),
        (steps(same(50), same(100), same(100), alone=(90, 90)), {"decodes": True}, "Store images decoded"),
        (steps(same(50), same(100), same(100), alone=(90, 90)), {"wide": ("page",)}, "Fewer one-hot columns (page)"),
        (steps(same(50), same(100), same(100), alone=(20, 20)), {"decodes": True}, "More cores a rank"),
        (steps(same(9), same(9), same(9), exchange=5), {"batchnorm": "sync"}, "--batchnorm ghost"),
        (steps(same(9), same(9), same(9), exchange=5), {}, "A larger --global-batch"),
        (steps(same(9), same(9), same(9)), {}, "More ranks"),
    ],
)
def test_what_is_advised_first(measured: Measured, changed: dict[str, Any], first: str) -> None:
    assert advice(judge(measured), measured, replace(SETTING, **changed))[0].startswith(first)


def test_a_step_is_as_slow_as_its_slowest_rank_and_the_exchange_as_its_most_punctual() -> None:
    def of_step(seconds: float, exchange: float, data: float = 0.0) -> dict[str, float]:
        return {"steps": 2, "seconds": seconds, "exchange_s": exchange, "data_s": data, "cpu_s": seconds}

    first = {kind: of_step(8.0, 6.0, data=2.0) for kind in (*KINDS, *ALONE)}  # it waits for the other one
    other = {kind: of_step(10.0, 1.0) for kind in (*KINDS, *ALONE)}
    measured = put_together([[first], [other]])
    assert measured.synthetic == Spread(5.0, 5.0, 5.0)
    assert measured.exchange_s == 0.5
    assert measured.fetching.median == 0
    assert measured.waiting["cold"] == 0.25
    assert measured.input_cpu_s == 5.0
