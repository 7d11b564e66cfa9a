"""The copy that multiplies and judges, against NumPy; and what the exchange makes of its judgement."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.training.comm import Communicator
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import all_finite, copy_scaled, lay_out, scaled
from lockstep.training.exchange.exchange import Exchange
from tests.training._ring import run_ring

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [None, np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("size", [0, 1, 1003])
def test_copies_and_judges(dtype: Any, wrong: float | None, size: int) -> None:
    source = np.linspace(-3, 3, size).astype(dtype)
    if wrong is not None and size:
        source[size // 2] = wrong
    out = np.zeros(size, dtype)
    fine = wrong is None or not size
    assert copy_scaled(source, 0.25, out, 4) == fine
    assert all_finite(source) == fine
    expected = np.multiply(source, 0.25, casting="same_kind").astype(dtype)
    np.testing.assert_array_equal(out.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_share_is_not_rounded_to_two_bytes(dtype: Any) -> None:
    """One of three ranks: rounded to bfloat16 all products would be 0.2 % too large."""
    source = np.linspace(1, 2, 129).astype(dtype)
    out = np.zeros_like(source)
    copy_scaled(source, 1 / 3, out, 3)
    expected = (source.astype(np.float64) / 3).astype(np.float32).astype(dtype)
    for found in (out, scaled(source, 1 / 3)):
        assert found.dtype == source.dtype
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))


@given(arrays(np.float32, 7, elements=st.floats(width=32)), st.integers(1, 9), st.sampled_from([0.5, 1.0, 4.0]))
def test_what_is_called_safe_is_safe(values: np.ndarray, ranks: int, factor: float) -> None:
    out = np.zeros(7, np.float32)
    safe = copy_scaled(values, factor, out, ranks)
    assert all_finite(values) == np.isfinite(values).all()
    with np.errstate(all="ignore"):
        sums = np.sum([np.abs(values) * np.float32(factor)] * ranks, axis=0, dtype=np.float32)
    assert not safe or np.isfinite(sums).all()


@pytest.mark.parametrize(
    ("value", "factor", "ranks", "safe"),
    [
        (1.5e38, 1.0, 1, True),
        (-1.5e38, 1.0, 3, False),  # three of them are infinite
        (1.5e38, 1 / 3, 3, True),
        (5e37, 4.0, 3, False),
        (1.8e38, 1.0, 1, False),  # more than half of what float32 holds: nothing is promised
    ],
)
def test_sums_over_ranks_count(value: float, factor: float, ranks: int, safe: bool) -> None:
    out = np.zeros(2, np.float32)
    assert copy_scaled(np.array([1.0, value], np.float32), factor, out, ranks) == safe


def test_a_large_number_alarms_nobody() -> None:
    """It might make a sum infinite on other ranks, so all look at the sums, and find them finite."""

    def work(comm: Communicator) -> float:
        exchange = Exchange(comm, 1.0)
        value = np.full(3, 3e38 if comm.rank else -3e38, np.float32)
        exchange.use(lay_out([(value.shape, value.dtype)], [], CONTROL_WORDS), ["t"])
        exchange.post(0, value)
        (total,) = exchange.finish(np.array(1.0, np.float32))
        assert exchange.agreement is not None
        exchange.close()
        return float(total[0])

    assert run_ring(2, work) == [0.0, 0.0]
