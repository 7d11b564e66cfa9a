"""Exact sums against Python's fractions, for values of every size and in any grouping."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.fit.exact_sums import FLOAT_UNIT, ExactSums
from lockstep.storage.errors import DataError

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TINY = 5e-324


def exact(values: list[float]) -> tuple[Fraction, Fraction]:
    """(mean, variance) of the whole, as fractions."""
    mean = sum(map(Fraction, values), Fraction(0)) / len(values)
    return mean, sum((Fraction(value) ** 2 for value in values), Fraction(0)) / len(values) - mean**2


@settings(max_examples=80, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=30), st.integers(0, 30))
def test_sums_of_floats_are_exact_in_any_grouping(values: list[float], cut: int) -> None:
    sums, other = ExactSums(FLOAT_UNIT), ExactSums(FLOAT_UNIT)
    sums.add(np.array(values[:cut]))
    other.add(np.array(values[cut:][::-1]))
    sums.merge(other)
    step = Fraction(2) ** FLOAT_UNIT
    mean, variance = exact(values)
    assert sums.count == len(values)
    assert sums.total * step == mean * len(values)
    assert sums.squares * step**2 == (variance + mean**2) * len(values)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_sums_of_whole_numbers_are_exact(values: list[int]) -> None:
    sums = ExactSums(0)
    sums.add(np.array(values, dtype=np.int64))
    assert (sums.total, sums.squares) == (sum(values), sum(value * value for value in values))


def test_a_large_chunk_of_large_numbers() -> None:
    """More values than one chunk, all limbs full: the sums of products must not wrap around."""
    values = np.full((1 << 18) + 5, 2**63 - 1, dtype=np.int64)
    sums = ExactSums(0)
    sums.add(values)
    assert (sums.total, sums.squares) == (len(values) * (2**63 - 1), len(values) * (2**63 - 1) ** 2)


@pytest.mark.parametrize(
    "values",
    [
        [1e16, 1.0, -1e16],  # the sum of floats would lose the 1
        [1e9 + 0.1, 1e9 + 0.2, 1e9 + 0.3],  # squares minus the mean's square would be noise
        [TINY, -TINY, TINY],
        [0.1] * 10,
    ],
)
def test_mean_and_variance_are_rounded_once(values: list[float]) -> None:
    sums = ExactSums(FLOAT_UNIT)
    sums.add(np.array(values))
    found = sums.moments("x", ("train",))
    mean, variance = exact(values)
    assert (found.mean, found.variance) == (float(mean), float(variance))


def test_what_has_no_mean_is_told() -> None:
    with pytest.raises(DataError, match="no value"):
        ExactSums(0).moments("x", ("train",))
    sums = ExactSums(FLOAT_UNIT)
    sums.add(np.array([1e300, -1e300]))
    with pytest.raises(DataError, match="beyond float64"):
        sums.moments("x", ("train",))
