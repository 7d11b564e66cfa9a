"""The epoch plan's promises, for any small shard table, G, L, W, number of epochs and number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.lane_count import check_lanes, default_lanes
from lockstep.training.plan.mixture import MixedPlan
from lockstep.training.plan.order import BlockTable, Orders, Run

Record = tuple[int, int]  # shard, record


def make(shards: tuple[int, ...], *, block: int = 4, batch: int = 4, lanes: int = 2, window: int = 3) -> EpochPlan:
    return EpochPlan(
        dataset_digest="ab" * 32,
        split="train",
        shard_records=shards,
        block_records=block,
        seed=7,
        global_batch=batch,
        lanes=lanes,
        window_records=window,
    )


@dataclass(frozen=True)
class Case:
    plan: EpochPlan
    epochs: int


def block_sizes(plan: EpochPlan) -> list[int]:
    size = plan.block_records
    return [min(size, n - first) for n in plan.shard_records for first in range(0, n, size)]


def everything(plan: EpochPlan) -> list[Record]:
    """All records in file order; of a block that keeps K, its first K."""
    size = plan.block_records
    firsts = [(shard, first) for shard, n in enumerate(plan.shard_records) for first in range(0, n, size)]
    counts = plan.kept or block_sizes(plan)
    return [(shard, first + i) for (shard, first), kept in zip(firsts, counts, strict=True) for i in range(kept)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lanes = draw(st.integers(1, 6))
    shards = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) >= lanes))
    plan = make(
        tuple(shards),
        block=draw(st.integers(1, 9)),
        batch=lanes * draw(st.integers(1, 4)),
        lanes=lanes,
        window=draw(st.integers(1, 12)),
    )
    groups = draw(st.sampled_from([None, *(size for size in range(1, lanes + 1) if lanes % size == 0)]))
    seed, interleave = draw(st.integers(-5, 2**63)), draw(st.sampled_from([None, None, 2, 3, 8]))
    plan = replace(plan, seed=seed, cache_groups=groups, interleave=interleave)
    if draw(st.booleans()):
        kept = draw(st.tuples(*(st.integers(0, size) for size in block_sizes(plan))).filter(lambda n: sum(n) >= lanes))
        plan = replace(plan, where="x > 0", kept=kept)
    return Case(plan, draw(st.integers(1, 4)))


def records_of(plan: EpochPlan, epoch: int, start: int, stop: int) -> list[Record]:
    runs = plan.runs(epoch, start, stop)
    return [(run.shard, run.first_record + i) for run in runs for i in range(run.count)]


def stream(plan: EpochPlan, lane: int, start: int, stop: int) -> list[tuple[int, Record]]:
    """(epoch, record) of samples start..stop-1 of a lane."""
    found = []
    for epoch, positions in plan.lane_positions(lane, start, stop):
        found += [(epoch, records_of(plan, epoch, int(p), int(p) + 1)[0]) for p in positions]
    return found


def batch(plan: EpochPlan, step: int, num_ranks: int = 1) -> list[tuple[int, Record]]:
    """A global batch as `num_ranks` ranks put it together, rank after rank."""
    each = plan.global_batch // plan.lanes
    return [
        sample
        for rank in range(num_ranks)
        for lane in plan.rank_lanes(rank, num_ranks)
        for sample in stream(plan, lane, step * each, (step + 1) * each)
    ]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_each_sample_of_each_epoch_is_used_once_or_left_over(case: Case) -> None:
    plan, epochs = case.plan, case.epochs
    used = Counter(sample for step in range(plan.first_step(epochs)) for sample in batch(plan, step))
    left = [(epoch, records_of(plan, epoch, position, position + 1)[0]) for epoch, position in plan.leftover(epochs)]
    assert len(left) < plan.global_batch
    used.update(left)
    assert set(used) == {(epoch, record) for epoch in range(epochs) for record in everything(plan)}
    assert set(used.values()) == {1}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_table_has_each_record_in_file_order(case: Case) -> None:
    table, records = case.plan.table, everything(case.plan)
    assert table.records == case.plan.total == len(records)
    runs = table.rows(0, table.records)
    assert [(run.shard, run.first_record + i) for run in runs for i in range(run.count)] == records
    for place, (shard, record) in enumerate(records):
        assert table.number(Run(shard, record, 1)) == place
        assert table.rows(place, place + 1) == [Run(shard, record, 1)]
    blocks = [table.run(block) for block in range(table.num_blocks)]
    assert blocks == runs and table.sizes(np.arange(table.num_blocks)).tolist() == [run.count for run in blocks]


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_global_batch_is_full_and_the_same_at_any_number_of_ranks(case: Case, data: st.DataObject) -> None:
    plan = case.plan
    step = data.draw(st.integers(0, plan.first_step(case.epochs)))
    alone = batch(plan, step)
    assert len(alone) == plan.global_batch
    for num_ranks in range(1, plan.lanes + 1):
        assert batch(plan, step, num_ranks) == alone
        assert sum(plan.rows(rank, num_ranks) for rank in range(num_ranks)) == plan.global_batch
        assert min(plan.rows(rank, num_ranks) for rank in range(num_ranks)) > 0


@given(cases())
@settings(max_examples=60, deadline=None)
def test_spans_tile_each_epoch_and_lanes_never_drift_by_more_than_one(case: Case) -> None:
    plan = case.plan
    for epoch in range(case.epochs):
        spans = [plan.lane_span(epoch, lane) for lane in range(plan.lanes)]
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == plan.total
        received = [plan.received(lane, epoch + 1) for lane in range(plan.lanes)]
        assert max(received) - min(received) <= 1


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_lane_entered_anywhere_goes_on_as_if_read_from_the_start(case: Case, data: st.DataObject) -> None:
    plan = case.plan
    lane = data.draw(st.integers(0, plan.lanes - 1))
    length = plan.received(lane, case.epochs)
    start = data.draw(st.integers(0, length))
    assert stream(plan, lane, start, length) == stream(plan, lane, 0, length)[start:]
    for n in range(length):
        epoch, offset = plan.lane_at(lane, n)
        span = plan.lane_span(epoch, lane)
        assert plan.received(lane, epoch) + offset == n and 0 <= offset < span[1] - span[0]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_an_epoch_permutes_whole_blocks_and_runs_stay_within_one(case: Case) -> None:
    # Groups cut the blocks at their ends, and interleaved lanes everywhere.
    plan = replace(case.plan, cache_groups=None, interleave=None)
    runs = plan.runs(0, 0, plan.total)
    assert len(runs) == plan.table.num_blocks
    assert all(run.first_record % plan.block_records == 0 for run in runs)
    blocks = Counter((shard, record - record % plan.block_records) for shard, record in everything(plan))
    assert {(run.shard, run.first_record): run.count for run in runs} == blocks
    assert records_of(plan, 0, 0, plan.total) == [r for p in range(plan.total) for r in records_of(plan, 0, p, p + 1)]


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_cache_groups_keep_their_blocks(case: Case, data: st.DataObject) -> None:
    divisors = [size for size in range(1, case.plan.lanes + 1) if case.plan.lanes % size == 0]
    plan = replace(case.plan, cache_groups=data.draw(st.sampled_from(divisors)), interleave=None)
    assert plan.cache_groups is not None
    first = data.draw(st.integers(0, 3))
    members, blocks = [], []
    for epoch in range(first, first + 4):
        starts = plan.group_starts(epoch)
        ends = list(pairwise(starts))
        width = plan.lanes // plan.cache_groups
        assert [start for start, _ in ends] == [plan.lane_span(epoch, c * width)[0] for c in range(plan.cache_groups)]
        members.append([set(records_of(plan, epoch, *end)) for end in ends])
        blocks.append([len(plan.runs(epoch, *end)) for end in ends])
        assert sum(len(group) for group in members[-1]) == plan.total
        runs = plan.runs(epoch, 0, plan.total)
        # Each end of a group cuts at most one block in two.
        assert len(runs) <= plan.table.num_blocks + plan.cache_groups - 1
    for group in range(plan.cache_groups):
        stays = set.intersection(*(of_epoch[group] for of_epoch in members))
        ever = set.union(*(of_epoch[group] for of_epoch in members))
        assert len(ever - stays) <= 2  # at most one sample at each end


@given(cases())
@settings(max_examples=60, deadline=None)
def test_keras_epochs_cut_the_steps_without_gap(case: Case) -> None:
    plan = case.plan
    for step in range(plan.first_step(case.epochs)):
        epoch = plan.epoch_of_step(step)
        assert plan.first_step(epoch) <= step < plan.first_step(epoch + 1)


def test_epochs_seeds_splits_and_datasets_have_other_orders() -> None:
    plan = make((40, 37, 41), block=2, window=25)
    orders = [
        records_of(plan, 0, 0, 118),
        records_of(plan, 1, 0, 118),
        records_of(replace(plan, seed=8), 0, 0, 118),
        records_of(replace(plan, split="other"), 0, 0, 118),
        records_of(replace(plan, dataset_digest="cd" * 32), 0, 0, 118),
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert plan.window_order(0, 0, 0).tolist() != plan.window_order(0, 1, 1).tolist()


def test_the_plan_is_pinned_for_ever() -> None:
    # A run resumed by a later version must go on with the same batches: these are the values of plan version 1.
    plan = make((9, 4))
    assert batch(plan, 2) == PINNED
    assert sha256(canonical_bytes(plan.identity())).hexdigest()[:16] == PINNED_IDENTITY
    assert batch(replace(plan, cache_groups=2), 5) == PINNED_GROUPS
    assert batch(replace(plan, interleave=2), 2) == PINNED_INTERLEAVED


PINNED = [(0, (0, 3)), (0, (1, 0)), (0, (0, 6)), (0, (0, 7))]
PINNED_IDENTITY = "1bac6eed3eb8a0be"
PINNED_GROUPS = [(1, (0, 5)), (1, (0, 6)), (1, (1, 2)), (1, (0, 8))]

PINNED_INTERLEAVED = [(0, (1, 0)), (0, (0, 2)), (0, (0, 4)), (0, (0, 7))]


def test_a_window_of_an_interleaved_lane_holds_records_of_that_many_blocks() -> None:
    plan = make((4000,), block=100, batch=4, lanes=2, window=40)
    for interleave, blocks in ((None, 1), (2, 2), (8, 8)):
        mixed = replace(plan, interleave=interleave)
        start, stop = mixed.lane_span(0, 1)
        windows = [mixed.runs(0, first, first + 40) for first in range(start, stop - 40, 40)]
        of_each = [len({run.first_record // 100 for run in runs}) for runs in windows]
        assert min(of_each) >= blocks and max(of_each) <= 2 * blocks
        assert sorted(records_of(mixed, 0, start, stop)) == sorted(records_of(plan, 0, start, stop))


def test_orders_of_neighbouring_epochs_stay_and_others_go() -> None:
    """An audit goes through all epochs lane by lane: what it begins again with stays beside the last ones no longer."""
    orders = Orders(BlockTable((20, 21), 8), b"root")
    five, six, first = (orders.order(epoch) for epoch in (5, 6, 0))
    second = orders.order(1)
    assert orders.order(0) is first and orders.order(1) is second
    assert orders.order(5) is not five and orders.order(6) is not six


def test_the_blocks_of_a_group_are_permuted_each_epoch() -> None:
    plan = make((400,), block=4, batch=4, lanes=4, window=3)
    plan = replace(plan, cache_groups=2)
    orders = [records_of(plan, epoch, 0, 200) for epoch in range(6)]
    assert len({frozenset(order) for order in orders}) == 1
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.parametrize(
    ("batch_size", "groups", "hint"),
    [
        (60, 5, "--cache-groups 4 or --lanes 15."),
        (12, 5, "--cache-groups 4 or --lanes 15 with a --global-batch that is a multiple of 15."),
        (48, 9, "--cache-groups 6 or --lanes 18 with"),  # no multiple of 9 divides 48
        (48, 24, "--cache-groups 12 or --lanes 24."),  # more groups than lanes
        (12, 0, "--cache-groups 1"),
    ],
)
def test_cache_groups_that_cannot_be(batch_size: int, groups: int | None, hint: str) -> None:
    with pytest.raises(ConfigError, match="cache groups and lanes") as caught:
        replace(make((40,), batch=batch_size, lanes=12), cache_groups=groups)
    assert hint in caught.value.next_step


def test_a_plan_over_a_hundred_million_blocks_is_cheap() -> None:
    plan = make((250_000_003,) * 1000, block=2500, batch=1024, lanes=64, window=4000)
    epoch, offset = plan.lane_at(63, 10**10)
    start, stop = plan.lane_span(epoch, 63)
    runs = plan.runs(epoch, start + offset, start + offset + 4000)
    assert stop - start > 3 * 10**9 and sum(run.count for run in runs) == 4000


@pytest.mark.parametrize(
    ("batch_size", "groups", "total", "lanes", "cache_groups"),
    [
        (64, None, 10**6, 64, None),  # G itself
        (192, None, 10**6, 64, None),  # largest divisor up to 64
        (100, None, 10**6, 50, None),
        (67, None, 10**6, 1, None),  # a prime above 64 has only 1
        (61, None, 10**6, 61, None),
        (64, None, 10, 8, None),  # never more lanes than samples
        (96, 8, 10**6, 48, None),  # a multiple of the groups
        (88, 8, 10**6, 8, None),  # 11 * 8 is above 64
        (8, 8, 10**6, 8, None),
        (100, None, 10**6, 20, 4),  # 50 is no multiple of the cache groups
        (144, 8, 10**6, 48, 3),  # a multiple of both, 24
    ],
)
def test_default_lanes(batch_size: int, groups: int | None, total: int, lanes: int, cache_groups: int | None) -> None:
    assert default_lanes(batch_size, groups, total, cache_groups) == lanes


def test_cache_groups_that_no_lanes_of_the_batch_fit() -> None:
    with pytest.raises(ConfigError, match="do not fit together") as caught:
        default_lanes(60, None, 10**6, 8)
    assert "--cache-groups 4 or --global-batch 64" in caught.value.next_step


@pytest.mark.parametrize(
    ("num_ranks", "groups", "rows"),
    [
        (1, None, [24]),
        (3, None, [8, 8, 8]),
        (5, None, [4, 4, 6, 4, 6]),  # 12 lanes over 5 ranks: uneven
        (3, 4, [6, 6, 12]),  # whole groups of 3 lanes: 1, 1 and 2 of them
        (4, 4, [6, 6, 6, 6]),
    ],
)
def test_rows_of_each_rank(num_ranks: int, groups: int | None, rows: list[int]) -> None:
    plan = make((100,), batch=24, lanes=12)
    assert [plan.rows(rank, num_ranks, groups) for rank in range(num_ranks)] == rows


@pytest.mark.parametrize(
    ("shares", "groups", "fits"),
    [
        ((9, 3), None, True),
        ((9, 3), 4, True),
        ((10, 2), None, True),
        ((10, 2), 4, False),  # groups of 3 lanes
        ((9, 2), None, False),
        ((12, 0), None, False),
        ((6, 3, 3), None, False),  # for 3 ranks
    ],
)
def test_shares_are_all_lanes_in_whole_groups(shares: tuple[int, ...], groups: int | None, fits: bool) -> None:
    part = make((100,), batch=24, lanes=12)
    for plan in (part, MixedPlan(dataset_digest=part.dataset_digest, ratios=(1, 1), parts=(part, part))):
        if fits:
            lanes = [plan.rank_lanes(rank, 2, groups, shares) for rank in range(2)]
            assert [*lanes[0], *lanes[1]] == list(range(12)) and tuple(map(len, lanes)) == shares
            assert plan.rows(0, 2, groups, shares) * 12 == plan.global_batch * shares[0]
        else:
            with pytest.raises(ConfigError, match="do not fit together"):
                plan.rank_lanes(0, 2, groups, shares)


@pytest.mark.parametrize(
    ("batch_size", "lanes", "groups", "num_ranks", "hint"),
    [
        (30, 4, None, 1, "--lanes 3 or --global-batch 32"),  # L must divide G
        (3, 4, None, 1, "--lanes 3 or --global-batch 4"),  # more lanes than samples of a batch
        (32, 4, None, 5, "--lanes 8"),  # more ranks than lanes, a larger divisor will do
        (30, 4, None, 5, "--lanes 3 or --global-batch 32"),  # the first thing wrong is told first
        (4, 4, None, 6, "--lanes 6 with --global-batch 6"),  # no divisor of 4 will do
        (24, 12, 8, 1, "--lanes 16 with a --global-batch that is a multiple of 16"),  # uneven groups
        (16, 16, 8, 9, "--num-ranks 8 or fewer"),  # ranks own whole groups
        (20, 8, 8, 1, "Use --global-batch 16"),  # with groups another L is no way out
    ],
)
def test_refusals_name_what_would_do(
    batch_size: int, lanes: int, groups: int | None, num_ranks: int, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_lanes(batch_size, lanes, groups, num_ranks)
    assert hint in caught.value.next_step


def test_more_lanes_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 lanes are more than the samples") as caught:
        make((3,), batch=8, lanes=4)
    assert "--lanes 2" in caught.value.next_step


def test_an_empty_split_and_a_run_without_a_step_are_refused() -> None:
    with pytest.raises(DataError, match="has no records"):
        make((0, 0))
    small = make((3,), batch=8, lanes=2)
    assert [small.first_step(e) for e in range(4)] == [0, 0, 0, 1]  # two epochs without a step, then one
    assert small.steps(3) == 1
    with pytest.raises(ConfigError, match="not one full global batch") as caught:
        small.steps(2)
    assert "--global-batch 6 or less" in caught.value.next_step
    with pytest.raises(ConfigError) as caught:
        small.steps(1)
    assert "--global-batch 2 or less" in caught.value.next_step  # 3 is not divided by 2 lanes


@pytest.mark.parametrize("name", ["window_records", "interleave"])
def test_a_number_that_no_stored_plan_may_have_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 9223372036854775808"):
        numbers: dict[str, Any] = {name: 1 << 63}
        replace(make((9,)), **numbers)


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="version"):
        replace(make((9,)), version=2)
