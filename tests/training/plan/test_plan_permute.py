"""The keyed permutation is a bijection with an inverse, differs by key, and is fair on tiny domains."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.training.plan.permutation import BlockPermutation, derive_key, shuffled, shuffled_each
from lockstep.training.plan.permutation_kernel import sort


@given(size=st.integers(0, 3000), key=st.binary(min_size=32, max_size=32))
def test_forward_is_a_bijection_and_inverse_undoes_it(size: int, key: bytes) -> None:
    permutation = BlockPermutation(key, size)
    forward = permutation.forward(np.arange(size))
    assert sorted(forward.tolist()) == list(range(size))
    assert permutation.inverse(forward).tolist() == list(range(size))


def test_a_huge_domain_costs_no_memory() -> None:
    size = 10**15 + 7
    permutation = BlockPermutation(b"k" * 32, size)
    values = np.array([0, 1, size // 2, size - 1])
    there = permutation.forward(values)
    assert len(set(there.tolist())) == 4 and there.max() < size
    assert permutation.inverse(there).tolist() == values.tolist()


@pytest.mark.parametrize(
    "size",
    [
        2,  # the smallest that has two orders
        5,  # where a bare Feistel network fails this test
    ],
)
def test_every_order_of_a_few_items_is_equally_likely(size: int) -> None:
    draws = 12_000
    keys = (derive_key(b"fair", "blocks", number) for number in range(draws))
    seen = Counter(tuple(BlockPermutation(key, size).forward(np.arange(size)).tolist()) for key in keys)
    expected = draws / math.factorial(size)
    assert len(seen) == math.factorial(size)
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    freedom = math.factorial(size) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # 4 sigma


def test_feistel_orders_are_fair_too() -> None:
    # 1,100 items, so a domain of 2,048 that is walked; 100 cells of (where item 3 goes, where item 4 goes).
    size, draws = 1100, 4000
    keys = (derive_key(b"fair", "blocks", number) for number in range(draws))
    pairs = np.array([BlockPermutation(key, size).forward([3, 4]) for key in keys])
    cells = np.bincount(pairs[:, 0] // 110 * 10 + pairs[:, 1] // 110, minlength=100)
    chi_square = float(((cells - draws / 100) ** 2 / (draws / 100)).sum())
    assert chi_square < 99 + 4 * math.sqrt(2 * 99)


def test_values_outside_are_refused() -> None:
    with pytest.raises(IndexError, match=r"outside 0\.\.4"):
        BlockPermutation(b"k" * 32, 5).forward([5])


def test_orders_are_pinned_for_ever() -> None:
    # A changed order would break the resumption of every run: these are the values of plan version 1.
    assert BlockPermutation(b"k" * 32, 5000).forward(np.arange(10)).tolist() == PINNED_BLOCKS
    assert BlockPermutation(b"k" * 32, 10).forward(np.arange(10)).tolist() == PINNED_WINDOW
    assert shuffled(b"k" * 32, 10).tolist() == PINNED_WINDOW


PINNED_BLOCKS = [1100, 769, 4522, 125, 4326, 4412, 2638, 783, 819, 1119]
PINNED_WINDOW = [7, 4, 8, 2, 3, 6, 5, 0, 9, 1]


@given(count=st.integers(0, 500), key=st.binary(min_size=32, max_size=32))
def test_a_window_order_is_a_permutation(count: int, key: bytes) -> None:
    assert sorted(shuffled(key, count).tolist()) == list(range(count))


def test_keys_differ_by_purpose_and_numbers() -> None:
    parts = [(b"r", "a", 1, 23), (b"r", "a", 12, 3), (b"r", "b", 1, 23), (b"s", "a", 1, 23)]
    assert len({derive_key(root, purpose, *numbers) for root, purpose, *numbers in parts}) == 4


@settings(deadline=None)  # the first call may have to compile
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 58))
def test_equal_hashes_keep_their_order(small: list[int], shift: int) -> None:
    # Shifted, the first bits of all are alike: nothing but insertion sorts them.
    hashes = np.array(small, dtype=np.uint64) << np.uint64(58 - shift)
    order = np.empty(len(hashes), dtype=np.int64)
    sort(hashes, order)
    assert order.tolist() == np.argsort(hashes, kind="stable").tolist()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 3000), st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=3))
def test_the_kernel_orders_as_numpy_does(count: int, keys: list[bytes]) -> None:
    assert [order.tolist() for order in shuffled_each(keys, count)] == [shuffled(key, count).tolist() for key in keys]
