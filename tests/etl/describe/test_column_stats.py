from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.etl.describe.statistics import BINS, MAX_DISTINCT, ColumnStats, ColumnSummary, NumberStats, histogram


def stats(dtype: str, *columns: pa.Array, shape: tuple[int | None, ...] = ()) -> ColumnSummary:
    made = ColumnStats("x", dtype, shape)
    for column in columns:
        made.add(column)
    return made.summary()


@given(hnp.arrays(st.sampled_from([np.int64, np.int8, np.float32, np.float64]), st.integers(1, 60)))
def test_each_finite_value_lies_in_one_bar(values: np.ndarray) -> None:
    finite = values[np.isfinite(values)]
    if len(finite):
        made = histogram(finite, "t")
        assert sum(count for _, count in made.bars) == len(finite)
        assert 1 <= len(made.bars) <= BINS


def test_the_widest_ranges_have_bars() -> None:
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    bars = histogram(np.array([least, 0, most]), "t").bars
    assert [count for _, count in bars if count] == [1, 1, 1] and bars[0][0].startswith(str(least))
    assert bars[-1][0].endswith(str(most))
    far = histogram(np.linspace(-0.85e308, 0.85e308, 100) * 2, "t").bars
    assert len(far) == BINS and far[0][0].startswith("-1.7e+308")


@given(st.floats(-1e300, 1e300), st.integers(1, 200))
def test_equal_values_have_no_deviation(value: float, rows: int) -> None:
    found = NumberStats()
    for _ in range(3):
        found.add(np.full(rows, value))
    assert found.deviation == 0 == np.ptp(np.full(rows, value))


def test_numbers_with_nulls_nan_and_infinity() -> None:
    found = stats("float64", pa.array([1.0, None, float("nan")]), pa.array([3.0, float("inf"), 0.0]))
    assert (found.rows, found.nulls) == (6, 1)
    facts = dict(found.facts)
    assert (facts["NaN"], facts["infinite"], facts["zeros"], facts["distinct"]) == ("1", "1", "1", "3")
    assert facts["values"].startswith("0 to 3, mean 1.33333") and facts["median"] == "1"


def test_a_column_without_values_says_so() -> None:
    assert stats("int64", pa.array([None, None], pa.int64())).facts == ()
    assert stats("string").rows == 0
    assert stats("string", pa.array([[], []], pa.list_(pa.string())), shape=(None,)).facts[0][1].startswith("0 to 0")


def test_texts_are_counted_most_frequent_first_and_long_ones_by_their_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = stats("string", pa.array(["b", "a", "b", "ä" * 300 + "1", "ä" * 300 + "2"]))
    assert found.histograms[-1].bars == (("b", 2), ("ä" * 200, 2), ("a", 1))
    assert dict(found.facts)["distinct"] == "3, by their first 200 characters"
    assert MAX_DISTINCT == 100_000
    monkeypatch.setattr("lockstep.etl.describe.statistics.MAX_DISTINCT", 2)
    assert dict(stats("string", pa.array(["a", "b", "c", "a"])).facts)["distinct"] == "more than 2"


def test_tensors_by_their_numbers() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    found = stats("uint8", pa.array([row.tobytes() for row in pixels]), shape=(2, 2))
    assert found.type == "uint8 2x2" and dict(found.facts)["values"] == "0 to 220, mean 110"
    floats = np.array([[1.5, 2.5]], "<f4")
    assert dict(stats("float32", pa.array([floats.tobytes()]), shape=(2,)).facts)["values"] == "1.5 to 2.5, mean 2"


@given(hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e6, 1e6)), st.integers(1, 30))
def test_numbers_in_pieces_are_told_as_numbers_at_once(values: np.ndarray, step: int) -> None:
    found = NumberStats()
    for start in range(0, len(values), step):
        found.add(values[start : start + step])
    assert (found.count, found.least, found.most) == (len(values), values.min(), values.max())
    assert np.isclose(found.mean, values.mean()) and np.isclose(found.deviation, values.std(), atol=1e-6)
    assert found.whole and np.array_equal(found.picked, values)


def test_a_long_way_of_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held stays few arrays, none of them empty, and is what one large piece comes to."""
    monkeypatch.setattr("lockstep.etl.describe.statistics.KEPT", 1000)
    monkeypatch.setattr("lockstep.etl.describe.statistics.MAX_PIECES", 20)
    values = np.arange(6000)
    small, large = NumberStats(), NumberStats()
    large.add(values)
    for start in range(0, len(values), 3):
        small.add(values[start : start + 3])
        assert len(small._picked) <= 20 and all(map(len, small._picked))
        assert small._held == sum(map(len, small._hashes)) <= 1000
    assert small._held > 300 and small.picked.tolist() == large.picked.tolist()


@pytest.mark.parametrize("shape", [(None,), (4, 2)])
def test_long_lists_and_tensors_are_not_kept_whole(
    shape: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place of a row has values of its own: whatever is picked is picked from all of them."""
    monkeypatch.setattr("lockstep.etl.describe.statistics.KEPT", 1000)
    values = (np.arange(80_000) % 8).astype("<f8")
    rows = values.reshape(-1, 8)
    made = ColumnStats("x", "float64", shape)
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        made.add(pa.array(part.tolist() if shape == (None,) else [row.tobytes() for row in part]))
    held = made.numbers
    assert 400 <= len(held.picked) <= 1000 and sum(map(len, held._hashes)) == len(held.picked)
    assert min(np.bincount(held.picked.astype(int), minlength=8)) > 30
    facts = dict(made.summary().facts)
    assert facts["values"] == "0 to 7, mean 3.5" and facts["standard deviation"] == f"{values.std():.4g}"
    assert facts["distinct"] == "8 or more" and facts["median"].startswith("about ") and facts["zeros"] == "10000"
    assert f"{len(held.picked)} of 80000" in made.summary().histograms[-1].title
