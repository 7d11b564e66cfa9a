"""Lanes that move from slow ranks to fast ones: when, how many, and that they change neither batches nor weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs import verify
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver import balance
from lockstep.training.driver.balance import BACK, MOST, QUIET, Balancer, Move, Window, best_shares, decide
from lockstep.training.driver.preflight import preflight
from lockstep.training.driver.stragglers import OWN
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from tests.training import _threads
from tests.training._threads import final_tensors, run
from tests.training._tiny import write_table

EVEN, MOVED = (16, 16), (22, 10)
PLAN = EpochPlan(
    dataset_digest="0" * 64, split="train", shard_records=(4096,), block_records=64, seed=0, global_batch=64,
    lanes=64, window_records=64,
)  # fmt: skip


def slowest(own: Sequence[float], shares: Sequence[int], after: Sequence[int]) -> float:
    return max(t * b / a for t, a, b in zip(own, shares, after, strict=True))


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4), st.integers(1, 3))
def test_no_other_split_is_faster(cost: list[float], width: int) -> None:
    units = 9
    shares = tuple(width * (units // len(cost) + (rank < units % len(cost))) for rank in range(len(cost)))
    own = [seconds * share for seconds, share in zip(cost, shares, strict=True)]
    found = best_shares(own, shares, width)
    assert sum(found) == sum(shares) and all(share >= width and share % width == 0 for share in found)
    most = -(-MOST * units // len(cost))
    grid = np.stack(np.meshgrid(*[np.arange(1, most + 1)] * len(cost)), -1).reshape(-1, len(cost))
    times = (grid[grid.sum(axis=1) == units] * width * np.array(cost)).max(axis=1)
    assert slowest(own, shares, found) == pytest.approx(times.min())


def windows(*own: Sequence[float]) -> list[Window]:
    return [Window(tuple(times), max(times) + 0.01) for times in own]


MADE = Move(10, EVEN, MOVED, 0.21, 0.14)


@pytest.mark.parametrize(
    ("seen", "shares", "moves", "number", "left", "after"),
    [
        (windows((0.1, 0.2), (0.1, 0.2)), EVEN, [], 2, 1000, (22, 10)),
        (windows((0.1, 0.2)), EVEN, [], 2, 1000, None),  # one window
        (windows((0.1, 0.1), (0.1, 0.3)), EVEN, [], 2, 1000, None),  # slow in one of two
        (windows((0.2, 0.1), (0.1, 0.2)), EVEN, [], 2, 1000, None),  # slow in turns
        (windows((0.1, 0.12), (0.1, 0.12)), EVEN, [], 2, 1000, None),  # would save less than a tenth
        ([Window((0.1, 0.2), 0.9)] * 2, EVEN, [], 2, 1000, None),  # little of a step, most of which is the exchange
        (windows((0.1, 0.2), (0.1, 0.2)), EVEN, [], 2, 100, None),  # a restart costs more than the rest gains
        (windows((0.1, 0.2), (0.1, 0.2)), (31, 1), [], 2, 1000, None),  # its last lane
        (windows((0.13, 0.26), (0.13, 0.26)), MOVED, [MADE], 10 + QUIET, 1000, None),  # the move did not help
        (windows((0.08, 0.16), (0.08, 0.16)), MOVED, [MADE], 9 + QUIET, 1000, None),  # too early
        (windows((0.08, 0.16), (0.08, 0.16)), MOVED, [MADE], 10 + QUIET, 2000, (26, 6)),
        (windows((0.16, 0.08), (0.16, 0.08)), MOVED, [MADE], 9 + BACK, 2000, None),  # back
        (windows((0.16, 0.08), (0.16, 0.08)), MOVED, [MADE], 10 + BACK, 2000, (17, 15)),
    ],
)
def test_a_move_is_made_when_it_pays(
    seen: list[Window],
    shares: tuple[int, ...],
    moves: list[Move],
    number: int,
    left: int,
    after: tuple[int, ...] | None,
) -> None:
    found = decide(seen, shares, 1, moves, number, steps_left=left, restart_s=5.0)
    assert (None if found is None else found.after) == after


def simulate(
    ranks: int, groups: int | None, steps: int, seed: int, slow: dict[int, float]
) -> tuple[Balancer, list[Any]]:
    """A run in lockstep with a row a step, and the noise of tests/training/driver/test_stragglers.py."""
    random = np.random.default_rng(seed)
    lasting = 1 + random.normal(0, 0.03, ranks).clip(-0.06, 0.06)
    balancer, made, clock = Balancer(PLAN, groups, steps, lambda: clock[0]), [], [0.0]
    even = [len(PLAN.rank_lanes(rank, ranks, groups)) for rank in range(ranks)]
    shares = balancer.begin(ranks) or even
    burst_rank, burst_until = 0, 0
    for step in range(1, steps + 1):
        own = lasting * random.lognormal(0, 0.15, ranks) * np.where(random.random(ranks) < 0.02, 3.0, 1.0)
        if random.random() < 0.01:
            burst_rank, burst_until = int(random.integers(ranks)), step + 5
        if step < burst_until:
            own[burst_rank] *= 1.5
        own *= [slow.get(rank, 1.0) * shares[rank] * ranks / 64 for rank in range(ranks)]
        clock[0] += own.max()
        for rank in random.permutation(ranks):
            row = {"rank": int(rank), "step": step, "steps": 1, "data_s": 0.1 * own[rank], "compute_s": 0.9 * own[rank],
                   "other_s": 0.0, "exchange_s": own.max() - own[rank] + 0.05}  # fmt: skip
            if (move := balancer.add(row)) is not None:
                made.append(move)
        if balancer.wanted is not None:
            clock[0] += 8.0
            shares = balancer.begin(ranks) or even
    return balancer, made


@settings(max_examples=6, deadline=None)
@given(ranks=st.sampled_from([2, 4, 8, 16]), seed=st.integers(0, 2**32))  # no rank has a lane more than others
def test_without_a_slow_rank_nothing_moves_in_1000_steps(ranks: int, seed: int) -> None:
    assert simulate(ranks, None, 1000, seed, {})[1] == []


@settings(max_examples=6, deadline=None)
@given(ranks=st.integers(2, 8), seed=st.integers(0, 2**32), groups=st.sampled_from([None, 16]))
def test_a_rank_at_half_speed_gets_nearly_its_best_share_by_one_move(ranks: int, seed: int, groups: int | None) -> None:
    balancer, made = simulate(ranks, groups, 1000, seed, {ranks - 1: 2.0})
    cost = [1.0] * (ranks - 1) + [2.0]
    even = [len(PLAN.rank_lanes(rank, ranks, groups)) for rank in range(ranks)]
    own = [seconds * share for seconds, share in zip(cost, even, strict=True)]
    best = slowest(own, even, best_shares(own, even, 64 // (groups or 64)))
    now = balancer.shares or even
    assert slowest(own, even, now) <= 1.15 * best
    assert len(made) <= 1 and sum(now) == 64
    assert balancer.begin(ranks + 1) is None, "another number of ranks begins with even shares"


def test_a_generation_that_failed_leads_back_to_even_shares() -> None:
    balancer = Balancer(PLAN, None, 1000)
    balancer.shares = (40, 24)
    assert balancer.begin(2) == (40, 24)
    balancer.failed()
    assert balancer.begin(2) is None


def config_of(folder: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"num_ranks": 2, "global_batch": 32, "lanes": 8, "epochs": 3, "seed": 7}
    options |= {"run": str(folder / "run"), "model": "logistic", "balance": True} | more
    return TrainConfig(datasets=(str(folder / "data"),), **options)


def test_what_cannot_be_balanced_is_refused_by_name(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"train": 400})
    for wrong, flag in (
        ({"canonical": True}, "--canonical"),
        ({"cache_groups": 2}, "--cache-groups"),
        ({"micro_batches": 2}, "--micro-batches"),
        ({"delay": 1}, "--delay"),
        ({"sync_every": 2, "batchnorm": "local"}, "--sync-every"),
        ({"compression": "int8"}, "--compression"),
        ({"batchnorm": "local"}, "--batchnorm"),
        ({"strategy": "federated", "clients": "b", "lanes": None}, "--strategy"),
        ({"strategy": "parameter-server", "servers": 1, "staleness": 2}, "--strategy"),
        ({"strategy": "mirrored", "num_ranks": 1}, "--strategy"),
        ({"strategy": "multi-worker-mirrored", "trust_network": "lo"}, "--strategy"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(tmp_path, **wrong)
        assert flag in caught.value.next_step and "with --balance" in caught.value.allowed
    with pytest.raises(ConfigError, match="nothing to move"):
        preflight(config_of(tmp_path, num_ranks=8))


@pytest.mark.slow
def test_lanes_that_moved_change_no_batch_and_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of 16 lanes each, then of 6 and 26, also after the run was stopped and resumed."""
    write_table(tmp_path / "data", records={"train": 400, "test": 30})
    options: dict[str, Any] = {"lanes": 32, "batchnorm": "sync", "audit": True, "precision": "float64", "epochs": 2}
    options |= {"model": "tests.training._models:momentum", "checkpoint_every": 1000}
    run(config_of(tmp_path, **options, balance=False, run=str(tmp_path / "even")))

    def leaves(control: Any, step: int, phase: str) -> None:
        if control._rank == 1 and control._handler.leave() is not None:
            control.leaving.set()

    asked = {5: (6, 26)}

    def decided(balancer: Balancer, row: dict[str, Any]) -> Move | None:
        if row["step"] in asked:
            before, after = balancer.shares or EVEN, asked.pop(row["step"])
            balancer.wanted = Move(1, before, after, 0.2, 0.1)
        return balancer.wanted

    monkeypatch.setattr("lockstep.training.rank.metrics.ROW_EVERY_S", 0.0)
    monkeypatch.setattr(_threads.Control, "beat", leaves)
    monkeypatch.setattr(Balancer, "add", decided)
    config = config_of(tmp_path, **options)
    assert run(config.but(max_steps=8)).restarts == 1
    run(config)
    claims = read_claims(filesystem(config.run), RunPaths(config.run)).values()
    assert [claim.shares for claim in claims] == [None, (6, 26), (6, 26)], "the last was resumed"
    capsys.readouterr()
    assert verify.main([config.run]) == 0 and "ok    audit" in capsys.readouterr().out
    expected, found = final_tensors(str(tmp_path / "even")), final_tensors(config.run)
    for name, value in expected.items():
        if name.startswith(("weights", "optimizer")):
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.soak
@pytest.mark.slow
def test_processes_with_one_slow_rank_take_shorter_steps_after_one_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 needs twice as long for each row; a step is as long as the slowest rank's own time."""
    monkeypatch.setattr(balance, "WORTH", 0.0)  # a run of seconds never gains what a restart costs
    write_table(tmp_path / "data", records={"train": 3200, "test": 30})
    config = config_of(
        tmp_path, model="tests.training._models:sleeps_by_row", lanes=32, batchnorm="sync",
        epochs=3, checkpoint_every=1000, audit=True, launcher="local",
    )  # fmt: skip
    train(config, run_local, hooks=Hooks(lease_watch_s=0.1))
    claims = read_claims(filesystem(config.run), RunPaths(config.run))
    shares = [claim.shares for claim in claims.values()]
    first = claims[2].parent
    assert len(shares) == 2 and shares[0] is None and first is not None
    own: dict[bool, list[list[float]]] = {False: [[], []], True: [[], []]}
    for row in read_history(config.run).times:
        own[row["step"] > first.step][row["rank"]].append(sum(row[part] for part in OWN) / max(1, row["steps"]))
    before_s, after_s = (max(map(median, own[moved])) for moved in (False, True))
    best_s = before_s * (2 * 11) / (2 * 16)  # 21 and 11 lanes of 32
    with capsys.disabled():
        print(
            f"\n{before_s * 1e3:.1f} ms a step at 16 16, {after_s * 1e3:.1f} at {shares[1]}, {after_s / before_s:.2f} "
        )
        print(f"of it, best {best_s / before_s:.2f}, so {after_s / best_s:.2f} times the best; moved at {first.step}")
    assert after_s < 0.8 * before_s
    assert verify.main([config.run]) == 0
