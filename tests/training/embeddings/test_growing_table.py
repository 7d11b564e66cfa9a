"""Tables for any ids: admission, eviction and updates over ranks against a dictionary, keys, and the hash table."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.comm import Communicator, SoloCommunicator
from lockstep.training.embeddings.growing_table import FIRST_ROWS, Entries, GrowingTable, mixed, shard_of, unmixed
from lockstep.training.embeddings.sharded_table import BETAS, EPSILON, SHARDS, TableOptions
from tests.training._ring import run_ring, run_solo

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, min_size=1, max_size=50, unique=True))
def test_keys_are_a_bijection_in_shards(ids: list[int]) -> None:
    keys = mixed(np.array(ids, np.int64))
    assert len(np.unique(keys)) == len(ids)
    np.testing.assert_array_equal(unmixed(keys), ids)
    shards = shard_of(np.sort(keys))
    assert shards.min() >= 0 and shards.max() < SHARDS and (np.diff(shards) >= 0).all()


def test_neighbouring_ids_are_spread_evenly() -> None:
    counts = np.bincount(shard_of(mixed(np.arange(256_000))), minlength=SHARDS)
    assert counts.min() > 850 and counts.max() < 1150


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 60), unique=True)), max_size=12))
@settings(deadline=None)
def test_entries_are_a_dictionary(steps: list[tuple[bool, list[int]]]) -> None:
    """Keys that fall into few slots are added and removed; 0 is a key like any other."""
    entries, known = Entries("t", {"value": ((2,), "float32")}), dict[int, float]()
    for number, (adds, chosen) in enumerate(steps):
        keys = np.array([one << 40 for one in chosen], np.int64)
        places = entries.find(keys)
        assert [place > 0 for place in places] == [int(key) in known for key in keys]
        if adds:
            new = keys[places == 0]
            entries.columns["value"][entries.add(new)] = number + 1
            known |= dict.fromkeys(new.tolist(), number + 1.0)
        else:
            gone = np.zeros(entries.count, np.bool_)
            gone[places[places > 0]] = True
            entries.remove(gone)
            known = {key: value for key, value in known.items() if key not in keys}
    assert len(entries) == len(known)
    found = entries.columns["value"][entries.find(np.array(list(known), np.int64))]
    np.testing.assert_array_equal(found, np.array([[value] * 2 for value in known.values()]).reshape(-1, 2))
    assert not entries.columns["value"][0].any()


class Reference:
    """A growing table in a dictionary, on global batches."""

    def __init__(self, options: TableOptions) -> None:
        self.options, self.step = options, 0
        self.rows: dict[int, list[Any]] = {}  # id -> [row, state..., seen]
        self.waiting: dict[int, list[int]] = {}  # id -> [times, seen]
        self.admitted = self.evicted = 0

    def first(self, one: int) -> np.ndarray:
        """The first values of an id's row, as a table that admits at once gives them."""
        table = GrowingTable(TableOptions("t", None, self.options.width, self.options.dtype, 3), SoloCommunicator())
        ids = np.array([one])
        table.look_up(ids, keep=True)
        table.commit(skipped=False)
        return table.look_up(ids, keep=False)[0][0]

    def look_up(self, ids: np.ndarray) -> np.ndarray:
        nothing = np.zeros(self.options.width)
        return np.array([self.rows[i][0] if i in self.rows else nothing for i in ids.tolist()])

    def commit(self, ids: np.ndarray, values: np.ndarray, skipped: bool) -> None:
        self.step += 1
        for one in np.unique(ids).tolist() if not skipped else []:
            times, gradient = int((ids == one).sum()), values[ids == one].sum(0)
            if one in self.rows:
                self.learn(self.rows[one], gradient)
                continue
            before = self.waiting.pop(one, [0, 0])[0]
            if before + times >= self.options.admit_after:
                self.rows[one] = [self.first(one), np.zeros_like(gradient), np.zeros_like(gradient), self.step]
                self.admitted += 1
            else:
                self.waiting[one] = [before + times, self.step]
        every = self.options.evict_after_steps
        if every and self.step % every == 0:
            kept = {one: row for one, row in self.rows.items() if row[-1] > self.step - every}
            self.evicted += len(self.rows) - len(kept)
            self.rows = kept
            self.waiting = {one: row for one, row in self.waiting.items() if row[-1] > self.step - every}

    def learn(self, row: list[Any], gradient: np.ndarray) -> None:
        rate = self.options.learning_rate
        if self.options.optimizer == "adagrad":
            row[2] = row[2] + (gradient**2).mean()
            row[0] = row[0] - rate / (np.sqrt(row[2]) + EPSILON) * gradient
        else:  # as keras.optimizers.Adam
            one, two = BETAS
            row[1], row[2] = one * row[1] + (1 - one) * gradient, two * row[2] + (1 - two) * gradient**2
            rate *= np.sqrt(1 - two**self.step) / (1 - one**self.step)
            row[0] = row[0] - rate * row[1] / (np.sqrt(row[2]) + EPSILON)
        row[3] = self.step


def shifted(comm: Communicator, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the rank before has, as if this one had read its file."""
    found = {}
    for name, column in columns.items():
        parts = [column[:0].reshape(-1)] * comm.num_ranks
        parts[(comm.rank + 1) % comm.num_ranks] = column.reshape(-1)
        found[name] = np.concatenate(comm.all_to_all_ragged(parts)).reshape(-1, *column.shape[1:])
    return found


@pytest.mark.parametrize(("num_ranks", "optimizer", "whole_at"), [(1, "adam", 3), (2, "adagrad", 8), (3, "adam", 3)])
def test_many_ranks_are_a_dictionary(num_ranks: int, optimizer: str, whole_at: int) -> None:
    """14 steps, one of them skipped, in float64 to 1e-12; the rows move to a table that is loaded from
    those of step `whole_at` and the difference to them at step 10, across two evictions or none."""
    options = TableOptions(
        "t", None, 3, "float64", seed=3, learning_rate=0.1, optimizer=optimizer, admit_after=3, evict_after_steps=4
    )
    rng = np.random.default_rng(0)
    ids = mixed(rng.zipf(1.3, (14, 60)) % 200 + 7)  # any int64
    values = rng.standard_normal((14, 60, 3))
    cuts = {1: [0, 60], 2: [0, 25, 60], 3: [0, 0, 35, 60]}[num_ranks]
    expected, seen = Reference(options), []
    for step in range(14):
        seen.append(expected.look_up(ids[step]))
        expected.commit(ids[step], values[step], skipped=step == 5)
    assert expected.evicted > 3 and expected.admitted > 15 and expected.waiting

    def work(comm: Communicator) -> tuple[GrowingTable, np.ndarray]:
        mine, part = GrowingTable(options, comm), slice(cuts[comm.rank], cuts[comm.rank + 1])
        whole: dict[str, np.ndarray] = {}  # set at step `whole_at`
        for step in range(14):
            found, number = mine.look_up(ids[step][part], keep=True)
            np.testing.assert_allclose(found.reshape(-1, 3), seen[step][part].reshape(-1, 3), atol=1e-12)
            assert mine.take_gradient(number, values[step][part])
            mine.commit(skipped=step == 5)
            assert not mine.rows.columns["rows"][0].any()
            if step + 1 == whole_at:
                whole = shifted(comm, mine.columns())
            if step == 9:
                moved = GrowingTable(options, comm)
                moved.load(whole)
                moved.step, moved.totals = mine.step, mine.totals
                moved.load(shifted(comm, mine.columns(since=whole_at)), whole=False)
                assert moved.figures()[:4].tolist() == mine.figures()[:4].tolist()
                mine = moved
        return mine, mine.figures()

    found = (run_ring if num_ranks > 1 else run_solo)(num_ranks, work)
    columns = [table.columns() for table, _ in found]
    whole = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    rows = dict(zip(whole["ids"].tolist(), whole["rows"], strict=True))
    assert set(rows) == set(expected.rows)
    for one, row in rows.items():
        np.testing.assert_allclose(row, expected.rows[one][0], atol=1e-12)
    waiting = zip(whole["waiting_ids"].tolist(), whole["waiting_times"], whole["waiting_seen"], strict=True)
    assert {one: [times, last] for one, times, last in waiting} == expected.waiting
    figures = sum(figures for _, figures in found)[:4].tolist()
    assert figures == [len(expected.rows), len(expected.waiting), expected.admitted, expected.evicted]


def test_a_table_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    table = GrowingTable(TableOptions("t", None, 4), SoloCommunicator())
    ids = np.arange(2 * FIRST_ROWS)
    table.look_up(ids, keep=True)
    memory = psutil.virtual_memory()
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory._replace(available=0))
    with pytest.raises(LockstepError, match="table t does not fit into the memory"):
        table.commit(skipped=False)


@pytest.mark.parametrize("wrong", [{"admit_after": 0}, {"evict_after_steps": 0}, {"rows": 9, "admit_after": 2}])
def test_invalid_tables_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="table t"):
        TableOptions(**{"name": "t", "rows": None, "width": 2, **wrong})
