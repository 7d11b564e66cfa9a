"""Weights that part between ranks are found, and told by rank and variable; ranks are threads, variables arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.comm import Communicator
from lockstep.training.exchange.compare_ranks import DivergedError, WeightCheck, checksums
from tests.training._ring import run_ring, run_solo


@dataclass
class Variable:
    """What a check asks of Keras' variables."""

    path: str
    value: Any = field(default_factory=lambda: np.arange(6, dtype=np.float32).reshape(2, 3))


def _flip(array: Any, bit: int) -> None:
    array.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("ranks", "flipped", "who", "agrees"),
    [
        (2, {1: [1]}, "rank 1 are not those of rank 0", "no majority"),  # of two, nobody knows which is wrong
        (3, {0: [2]}, "rank 0 are not those of the other 2 ranks", "a majority, 2 of 3"),  # rank 0 may be the odd one
        (4, {1: [1], 3: [1]}, "ranks 1, 3 are not those of rank 0", "no majority"),  # two against two
        (3, {0: [0], 1: [1], 2: [2]}, "ranks 1, 2 are not those of rank 0", "no majority"),  # each its own
    ],
)
def test_who_parted_is_named(
    ranks: int, flipped: dict[int, list[int]], who: str, agrees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.training.exchange.compare_ranks.COMPARE_EVERY", 5)

    def work(comm: Communicator) -> str:
        variables = [Variable(f"dense/{i}") for i in range(3)]
        check = WeightCheck(comm, variables)
        for step in range(1, 10):
            check.after(step)
        for number in flipped.get(comm.rank, ()):
            _flip(variables[number].value, 8 * comm.rank)
        check.after(14)  # not due
        with pytest.raises(DivergedError) as caught:
            check.after(15)
        comm.barrier()  # the communicator is whole
        return str(caught.value)

    told = run_ring(ranks, work)
    assert len(set(told)) == 1, "every rank tells the same"
    assert who in told[0] and agrees in told[0] and "after step 15" in told[0]
    first = min(number for numbers in flipped.values() for number in numbers)
    assert f"dense/{first} and" in told[0], "the first variable that differs"


def test_one_rank_has_nobody_to_compare_with() -> None:
    told = run_solo(1, lambda comm: WeightCheck(comm, [object()]).compare(1))
    assert told == [None], "and its weights are not looked at: this one has none"


@given(st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8]), st.integers(0, 47))
def test_any_bit_counts(dtype: Any, bit: int) -> None:
    value = np.arange(6).astype(dtype).reshape(3, 2)
    before = checksums([Variable("w", value)])
    _flip(value, bit)
    assert checksums([Variable("w", value)]) != before
    assert (checksums([Variable("w", value.T)]) != checksums([Variable("w", value)])).all(), "in the order of the array"


def test_empty_and_scalar_variables() -> None:
    assert checksums([Variable("a", np.zeros((0, 3))), Variable("b", np.float32(1))]).shape == (2,)
