"""Gradients of embeddings by rows: what comes out, and which way ranks take."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.training.comm import Communicator
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import lay_out
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.exchange.sparse import Table, added_up, goes_by_rows, sum_rows
from tests.training._fit_ranks import precision
from tests.training._own_steps import Learner, assert_as_one, on_ranks
from tests.training._ring import run_ring

Array = NDArray[Any]
TABLE = Table("t", (50, 3), np.dtype(np.float64))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_duplicates_are_added_up(found: list[int]) -> None:
    indices = np.array(found, np.int64)
    values = np.arange(len(found) * 2, dtype=np.float64).reshape(-1, 2)
    once, sums = added_up(indices, values)
    assert once.tolist() == sorted(set(found))
    whole = np.zeros((10, 2))
    np.add.at(whole, indices, values)
    np.testing.assert_array_equal(whole[once], sums)


class Counting:
    """A communicator that counts the bytes of what it is asked for."""

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.calls = inner, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Any:
        def call(buf: Array, *more: Any) -> Any:
            self.calls.append((name, buf.nbytes))
            return getattr(self._inner, name)(buf, *more)

        return call if name.startswith("all_") else getattr(self._inner, name)


@pytest.mark.parametrize(
    ("rows", "by_rows"),
    [
        ((0, 0, 0), True),  # nobody has any
        ((4, 0, 9), True),  # one rank has none
        ((20, 20, 20), True),  # 60 rows of 24 + 8 bytes, less than twice 50 of 24
        ((40, 35, 30), False),  # 75 different rows or more would be as many bytes as the whole tensor twice
    ],
)
def test_both_ways_have_the_same_sums(rows: tuple[int, ...], by_rows: bool) -> None:
    rng = np.random.default_rng(0)
    # Different rows on a rank, each twice: duplicates must not count as bytes.
    indices = [np.tile(rng.permutation(50)[:count], 2) for count in rows]
    values = [rng.standard_normal((len(one), 3)) for one in indices]

    def work(comm: Communicator) -> tuple[Any, ...]:
        counting: Any = Counting(comm)
        found = sum_rows(counting, TABLE, indices[comm.rank], values[comm.rank])
        return found, counting.calls

    results = run_ring(3, work)
    whole = np.zeros((50, 3))
    for one, value in zip(indices, values, strict=True):
        np.add.at(whole, one, value)
    for found, calls in results:
        assert goes_by_rows(TABLE, sum(rows)) == by_rows
        mine = np.zeros((50, 3))
        mine[found.indices] = found.values
        np.testing.assert_allclose(mine, whole, rtol=1e-12, atol=1e-12)
        assert found.values.tobytes() == results[0][0].values.tobytes()
        assert [name for name, _ in calls] == (
            ["all_gather", "all_gather_ragged", "all_gather_ragged"] if by_rows else ["all_gather", "all_reduce"]
        )
    if by_rows:
        sent = [sum(size for _, size in calls[1:]) for _, calls in results]
        assert sent == [count * TABLE.row_bytes for count in rows]


def test_rows_of_bfloat16() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        exchange = Exchange(comm)
        table = Table("t", (9, 2), np.dtype(ml_dtypes.bfloat16))
        exchange.use(lay_out([], [], CONTROL_WORDS), [], [table])
        exchange.post_rows(0, np.array([3, 3]), np.ones((2, 2), table.dtype))
        indices, values = exchange.finish(np.zeros((), np.float32))
        exchange.close()
        return indices.tolist(), values.dtype, values.tolist()

    assert run_ring(2, work) == [([3], np.dtype(ml_dtypes.bfloat16), [[2.0, 2.0]])] * 2


class Embedding(Learner):
    """A table of 40 rows, of which a batch touches few or nearly all, and a dense layer."""

    shapes = ((40, 6), (6, 1))

    def loss(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        table, kernel = (weight.value for weight in self.weights)
        return tf.reduce_mean(tf.square(tf.reduce_mean(tf.gather(table, x), axis=1) @ kernel - y))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),  # squares: duplicates that are not added up first would give another sum
        ("Adam", {"global_clipnorm": 0.01}),
        ("SGD", {"clipnorm": 0.01}),
        ("SGD", {"clipvalue": 0.001, "loss_scale_factor": 4.0}),  # Keras cannot divide rows: they become whole
        ("Lamb", {"gradient_accumulation_steps": 2}),
    ],
)
def test_by_rows_is_the_same_as_whole(name: str, options: dict[str, Any]) -> None:
    import keras

    def make() -> Any:
        return getattr(keras.optimizers, name)(0.1, **options)

    rng = np.random.default_rng(4)
    # Few ids, then so many that the whole tensor is fewer bytes, then few again.
    ids = [rng.integers(0, high, (12, width)) for high, width in ((5, 3), (40, 30), (5, 3), (9, 2))]
    data = [(one, one.sum(axis=1, keepdims=True) / 100) for one in ids]
    with precision("float64"):
        whole, _ = on_ranks(make, data, [slice(0, 12)], learner=Embedding, rows_from_bytes=1 << 30)
        shares = [slice(0, 4), slice(4, 12)]
        ranks, seen = on_ranks(make, data, shares, learner=Embedding, rows_from_bytes=0)
        alone, _ = on_ranks(make, data, [slice(0, 12)], learner=Embedding, rows_from_bytes=0)
    assert_as_one(whole[0], ranks)
    assert_as_one(whole[0], alone)
    assert seen[0] == seen[1]
