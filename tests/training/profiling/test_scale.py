"""How a run scales: what the points say about measured profiles, and a whole measurement with ranks as threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.profiling.profile import NO_RUN, Profile
from lockstep.training.profiling.scale import cores_of, points, scale, table
from lockstep.training.profiling.verdict import Measured, Setting, Spread, Verdict
from tests.training._threads import run_threads
from tests.training._tiny import write_table

ZERO = Spread(0.0, 0.0, 0.0)
SHARES = ("storage", "input", "exchange", "computing")


def profile_of(num_ranks: int, batch: int, step_s: float, shares: tuple[float, ...]) -> Profile:
    """A profile with these times, and nothing else in it."""
    empty: dict[str, Any] = dict.fromkeys(Measured.__dataclass_fields__, ZERO)
    measured = Measured(**{**empty, "cold": Spread(step_s, step_s, step_s)})
    setting: dict[str, Any] = dict.fromkeys(Setting.__dataclass_fields__, 0)
    return Profile(
        setting=Setting(**{**setting, "num_ranks": num_ranks, "global_batch": batch}),
        measured=measured,
        verdict=Verdict("computing", dict(zip(SHARES, shares, strict=True)), 1.0, steady=True),  # type: ignore[arg-type]
        advice=(), steps=8, settling=1, chunk_steps=1, rounds=3, state_bytes=0, copy_s=0.0, repeats=False,
        fetched_bytes=(1,), pass_bytes=1, split_bytes=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "step_s", "shares", "efficiency", "lost"),
    [
        # strong: half the step would be ideal; 10 ms of it are the exchange, 2 ms computing that did not shrink
        (64, 0.062, (0.0, 0.0, 10 / 62, 52 / 62), 50 / 62, (0.0, 0.0, 10 / 62, 2 / 62)),
        (64, 0.050, (0.0, 0.0, 0.0, 1.0), 1.0, (0.0, 0.0, 0.0, 0.0)),
        # faster than ideal: what the caches of more hosts save is a negative loss
        (64, 0.040, (0.0, 0.0, 0.0, 1.0), 1.25, (0.0, 0.0, 0.0, -0.25)),
        # weak: the same rows a rank, so the ideal step is as long as before
        (128, 0.125, (0.08, 0.0, 0.12, 0.8), 0.8, (0.08, 0.0, 0.12, 0.0)),
    ],
)
def test_efficiency_and_losses_add_up(
    batch: int, step_s: float, shares: tuple[float, ...], efficiency: float, lost: tuple[float, ...]
) -> None:
    first = profile_of(1, 64, 0.1, (0.0, 0.0, 0.0, 1.0))
    one, two = points([first, profile_of(2, batch, step_s, shares)])
    assert (one.speed_up, one.efficiency, set(one.lost.values())) == (1.0, 1.0, {0.0})
    assert two.efficiency == pytest.approx(efficiency)
    assert tuple(two.lost[part] for part in SHARES) == pytest.approx(lost)  # type: ignore[index]
    assert two.efficiency + sum(two.lost.values()) == pytest.approx(1.0)
    assert two.speed_up == pytest.approx(2 * two.efficiency)
    assert two.of_ceiling == pytest.approx(shares[3])
    assert f"{efficiency:.1%}" in table([one, two], weak=batch == 128)


def test_ranks_of_one_host_have_the_same_cores_at_each_number() -> None:
    before = os.sched_getaffinity(0)
    with cores_of(0.5):
        assert len(os.sched_getaffinity(0)) == max(1, round(len(before) / 2))
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_a_run_is_measured_at_each_number_of_ranks(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 400, "test": 8})
    config = TrainConfig(
        datasets=(str(tmp_path / "data"),), run=NO_RUN, model="logistic", num_ranks=1, global_batch=16, epochs=1,
        launcher="local",
    )  # fmt: skip
    for wrong in ([1], [2, 2], [0, 1]):
        with pytest.raises(ConfigError, match="--num-ranks of a scaling"):
            scale(config, run_threads, wrong)
    done: list[int] = []
    found = scale(config, run_threads, [2, 1], weak=True, steps=4, rounds=1, on_point=done.append)
    assert done == [1, 2] and [(each.num_ranks, each.global_batch) for each in found] == [(1, 16), (2, 32)]
    for each in found:
        assert each.samples_per_s == pytest.approx(each.global_batch / each.step_s)
        assert each.efficiency + sum(each.lost.values()) == pytest.approx(1.0)
    assert found[0].speed_up == 1.0 and found[1].lost["exchange"] > 0
