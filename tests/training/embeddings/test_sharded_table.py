"""Tables in shards: placement, look-ups and updates over ranks against NumPy on one table."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.embeddings.sharded_table import EPSILON, SHARDS, ShardedTable, TableOptions
from lockstep.training.embeddings.table_kernels import gather
from tests.training._ring import run_ring, run_solo
from tests.training._shared import run_shared


def run(num_ranks: int, work: Any, shared: bool = False) -> list[Any]:
    return (run_shared if shared else run_ring if num_ranks > 1 else run_solo)(num_ranks, work)


@given(st.integers(1, 5000), st.integers(1, 20))
def test_positions_are_a_bijection_in_even_shards(rows: int, num_ranks: int) -> None:
    table = TableOptions("t", rows, 1)
    positions = table.positions(np.arange(rows))
    assert len(np.unique(positions)) == rows and positions.min() >= 0 and positions.max() < table.padded
    bounds = table.bounds(num_ranks)
    assert bounds[0][0] == 0 and bounds[-1][1] == table.padded
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    each = table.padded // SHARDS
    assert all(start % each == 0 for start, _ in bounds)


def test_frequent_ids_are_spread_evenly() -> None:
    """Ids in the order of their frequency, by Zipf's law: no rank of 8 is asked for more than 1.5 times its share."""
    table = TableOptions("t", 1_000_000, 1)
    positions = table.positions(np.arange(20_000))
    asked = [int(((positions >= a) & (positions < b)).sum()) for a, b in table.bounds(8)]
    assert max(asked) < 1.1 * 20_000 / 8
    weights = 1 / np.arange(1, 20_001)
    weights[0] = 0  # one row is on one rank
    load = [float(weights[(positions >= a) & (positions < b)].sum()) for a, b in table.bounds(8)]
    assert max(load) < 1.5 * weights.sum() / 8


def reference(table: TableOptions, whole: np.ndarray, steps: list[list[tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
    """Row-wise Adagrad in NumPy on `whole` (rows, width), by id."""
    whole, squares = whole.astype(np.float64).copy(), np.zeros(len(whole))
    for step in steps:
        gradient = np.zeros_like(whole)
        for ids, values in step:
            np.add.at(gradient, ids.reshape(-1), values.reshape(-1, table.width))
        squares += (gradient**2).mean(axis=1)
        whole -= table.learning_rate / (np.sqrt(squares) + EPSILON)[:, None] * gradient
    return whole


def by_id(table: TableOptions, parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts)[table.positions(np.arange(table.rows or 0))]


@pytest.mark.parametrize(("num_ranks", "shared"), [(1, False), (2, False), (3, False), (4, True)])
def test_many_ranks_are_one(num_ranks: int, shared: bool) -> None:
    """Look-ups, repeated ids, two look-ups in a step, a rank without ids, a skipped step; float64, to 1e-12."""
    table = TableOptions("t", 1000, 5, "float64", seed=3, learning_rate=0.1)
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, (6, 12, 4)) % 1000
    values = rng.standard_normal((6, 12, 4, 5))
    cuts = {1: [0, 12], 2: [0, 5, 12], 3: [0, 0, 7, 12], 4: [0, 3, 6, 9, 12]}[num_ranks]
    start = by_id(table, [ShardedTable(table, SoloCommunicator()).rows])

    def work(comm: Communicator) -> np.ndarray:
        mine = ShardedTable(table, comm)
        part = slice(cuts[comm.rank], cuts[comm.rank + 1])
        for step in range(0, 6, 2):
            skipped = step == 2
            found, number = mine.look_up(ids[step][part], keep=True)
            again, other = mine.look_up(ids[step + 1][part], keep=True)
            if step == 0:
                np.testing.assert_array_equal(found, start[ids[0][part]])
            assert again.shape == (*ids[step + 1][part].shape, 5)
            assert mine.take_gradient(other, values[step + 1][part])
            assert mine.take_gradient(number, values[step][part])
            before = mine.rows.copy()
            mine.commit(skipped=skipped)
            assert skipped == np.array_equal(before, mine.rows)
        assert not mine._open and not mine._sums
        return mine.rows

    steps = [[(ids[i], values[i]), (ids[i + 1], values[i + 1])] for i in (0, 4)]
    np.testing.assert_allclose(by_id(table, run(num_ranks, work, shared)), reference(table, start, steps), atol=1e-12)


def test_the_same_bytes_in_every_run() -> None:
    table = TableOptions("t", 300, 7, seed=1)

    def work(comm: Communicator) -> bytes:
        mine, rng = ShardedTable(table, comm, scale=1 / 3), np.random.default_rng(comm.rank)
        for _ in range(5):
            _, number = mine.look_up(rng.zipf(1.2, 200) % 300, keep=True)
            mine.take_gradient(number, rng.standard_normal((200, 7)).astype(np.float32))
            mine.commit(skipped=False)
        return mine.rows.tobytes() + mine.state["squares"].tobytes()

    assert run(3, work) == run(3, work)


def test_what_is_not_finite_is_named_by_the_rank_that_has_it() -> None:
    table = TableOptions("t", 10, 2)

    def work(comm: Communicator) -> tuple[bool, bool, bool]:
        mine, found = ShardedTable(table, comm), []
        for values in (np.nan if comm.rank == 1 else 1.0, 2e38, 1.0):  # 2e38 + 2e38 is too large for float32
            _, number = mine.look_up(np.arange(10), keep=True)
            found.append(mine.take_gradient(number, np.full((10, 2), values, np.float32)))
            mine.commit(skipped=True)
        return found[0], found[1], found[2]

    nan, overflow, fine = zip(*run(2, work), strict=True)
    assert nan == (True, False)
    assert not any(overflow)
    assert all(fine)


def test_first_values_depend_on_seed_name_and_row_only() -> None:
    def values(num_ranks: int, **options: Any) -> np.ndarray:
        table = TableOptions(**{"name": "t", "rows": 5000, "width": 3, "spread": 0.5, **options})
        parts = run(num_ranks, lambda comm: ShardedTable(table, comm).rows)
        return by_id(table, parts)

    one = values(1)
    np.testing.assert_array_equal(one, values(3))
    assert abs(one.mean()) < 0.01 and abs(one.std() - 0.5 / np.sqrt(3)) < 0.01 and np.abs(one).max() <= 0.5
    assert len(np.unique(one)) > 0.99 * one.size
    assert not np.array_equal(one, values(1, seed=1)) and not np.array_equal(one, values(1, name="u"))
    assert not values(1, spread=0.0).any()


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 100), st.sampled_from(["float32", "float64"]))
@settings(deadline=None)
def test_gather(rows: int, width: int, count: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    table, chosen = rng.standard_normal((rows, width)).astype(dtype), rng.integers(0, rows, count)
    out = np.empty((count, width), dtype)
    gather(table, chosen + 7, 7, out)
    np.testing.assert_array_equal(out, table[chosen])


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"rows": 2**31}, {"width": 0}, {"dtype": "float16"}, {"spread": -1.0}, {"learning_rate": 0.0}],
)
def test_invalid_tables_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="table t"):
        TableOptions(**{"name": "t", "rows": 10, "width": 2, **wrong})


def test_ids_outside_of_the_table_are_refused() -> None:
    table = ShardedTable(TableOptions("t", 10, 2), SoloCommunicator())
    for ids in ([-1], [3, 10]):
        with pytest.raises(DataError, match="no row for an id"):
            table.look_up(np.array(ids), keep=False)
    assert table.look_up(np.zeros((0, 3), np.int32), keep=False)[0].shape == (0, 3, 2)
    with pytest.raises(ConfigError, match="at most 256"):
        table.options.bounds(257)
