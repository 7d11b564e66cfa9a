"""Baselines from labels alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.dummy import DummyRegressor

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm import Communicator
from lockstep.training.scoring.naive_baseline import Baseline, baseline_of, check_baseline
from tests.training._ring import run_ring

VOCABULARY = {"kind": "vocabulary", "file": "page.json", "max_size": 9, "min_count": 1, "oov_buckets": 1}
TABLE = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="page", dtype="string", nullable=True, encoding=VOCABULARY),
        Field(name="pace", dtype="float32"),
        Field(name="label", dtype="bool", kind="label"),
    )
)
CLASSES = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(name="pace", dtype="float32"),
        Field(name="label", dtype="int64", kind="label", num_classes=3),
    )
)


class Reader:
    """Ten blocks of four rows; page "a" is always yes, "b" never, a null one half."""

    table: Any
    skipped: Mapping[int, str] = MappingProxyType({})

    def __init__(self, labels: list[Any], weights: list[float] | None = None, blocks: int = 10) -> None:
        self.table = self
        self.num_blocks, self._labels = blocks, labels
        self._weights = weights or [1.0] * 4

    def run(self, block: int) -> int:
        return block

    def read(self, run: int) -> pa.RecordBatch:
        pages = pa.array(["a", "b", None, None], pa.string())
        columns = [pages, pa.array(self._labels), pa.array(self._weights, pa.float32())]
        return pa.RecordBatch.from_arrays(columns, names=["page", "label", "weight"])


def fitted(
    name: str,
    schema: Schema,
    labels: list[Any],
    num_ranks: int,
    *more: Any,
    ratios: tuple[int, ...] | None = None,
    weights: list[float] | None = None,
) -> list[Baseline]:
    def work(comm: Communicator) -> Baseline:
        baseline = Baseline(name, schema)
        readers: list[Any] = [Reader(labels, weights), *more]
        baseline.fit(readers, ratios, comm)
        return baseline

    return run_ring(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rates_of_values_are_smoothed_and_the_same_on_all_ranks(num_ranks: int) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(["b", None, "new", "a"])], names=["page"])
    for baseline in fitted("rate:page", TABLE, [True, False, True, False], num_ranks):
        # 10 rows each of a (all yes) and b (none), towards the mean 0.5 with the weight of 10 rows
        np.testing.assert_allclose(baseline.predict(rows)[:, 1], [0.25, 0.5, 0.5, 0.75])


def test_majority_is_the_share_of_each_class() -> None:
    (first, _) = fitted("majority", CLASSES, [0, 2, 2, 2], 2)
    rows = pa.RecordBatch.from_arrays([pa.array([1.0, 2.0])], names=["pace"])
    np.testing.assert_allclose(first.predict(rows), [[0.25, 0.0, 0.75]] * 2)
    (first, _) = fitted("majority", TABLE, [True, True, True, False], 2)
    np.testing.assert_allclose(first.predict(rows), [[0.25, 0.75]] * 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_count_by_their_weights(num_ranks: int) -> None:
    weighted = Schema((*TABLE.fields, Field(name="weight", dtype="float32", kind="weight")))
    rows = pa.RecordBatch.from_arrays([pa.array(["b", None, "new", "a"])], names=["page"])
    # 0.1 is no binary fraction: sums in another order would be other numbers.
    weights = np.array([0.1, 3.0, 0.7, 0.2], np.float32).astype(np.float64)
    mean, smoothing = (weights[0] + weights[2]) / weights.sum(), 10 * weights.mean()
    expected = np.array([
        smoothing * mean / (10 * weights[1] + smoothing),
        (10 * weights[2] + smoothing * mean) / (10 * (weights[2] + weights[3]) + smoothing),
        mean,
        (10 * weights[0] + smoothing * mean) / (10 * weights[0] + smoothing),
    ])  # fmt: skip
    for baseline in fitted("rate:page", weighted, [True, False, True, False], num_ranks, weights=weights.tolist()):
        assert baseline.class_counts == [20, 20]
        np.testing.assert_array_equal(baseline.predict(rows)[:, 1], expected.astype(np.float32))


def test_datasets_of_a_mixture_count_by_their_shares_of_a_batch() -> None:
    other = Reader([True, True, True, True], blocks=1)  # 4 rows of yes, next to 40 of which a quarter is
    for baseline in fitted("majority", TABLE, [True, False, False, False], 2, other, ratios=(3, 1)):
        rows = pa.RecordBatch.from_arrays([pa.array([1.0])], names=["pace"])
        np.testing.assert_allclose(baseline.predict(rows), [[0.75 * 0.75, 0.75 * 0.25 + 0.25]])
        assert baseline.class_counts == [30, 14]


def test_labels_that_are_no_classes_are_refused() -> None:
    number = Schema((*TABLE.fields[:-1], Field(name="label", dtype="float32", kind="label")))
    with pytest.raises(DataError, match="cannot count the label") as caught:
        fitted("majority", number, [0.0, 1.0, 0.5, 1.0], 2)
    assert caught.value.got == "0.5"


@settings(max_examples=15, deadline=None)
@given(
    labels=st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4),
    weights=st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=4, max_size=4).filter(any),
    num_ranks=st.integers(2, 3),
)
def test_mean_and_median_are_those_of_a_dummy_regressor_at_any_number_of_ranks(
    labels: list[float], weights: list[float] | None, num_ranks: int
) -> None:
    number = Schema((*TABLE.fields[:-1], Field(name="label", dtype="float64", kind="label")))
    weight = (Field(name="weight", dtype="float32", kind="weight"),) if weights is not None else ()
    rows = pa.RecordBatch.from_arrays([pa.array([1.0, 2.0])], names=["pace"])
    for name in ("mean", "median"):
        oracle = DummyRegressor(strategy=name).fit(np.zeros((4, 1)), labels, weights)
        expected = float(oracle.predict([[0]])[0])

        def work(comm: Communicator, name: str = name) -> Any:
            baseline = baseline_of(name, Schema((*number.fields, *weight)))
            readers: list[Any] = [Reader(labels, weights)]
            baseline.fit(readers, None, comm)
            return baseline.predict(rows)

        found: Any
        for found in run_ring(num_ranks, work):
            assert found.shape == (2, 1) and found.dtype == np.float32
            close = found[0, 0] == pytest.approx(expected, rel=1e-6, abs=1e-3)
            # Of equal halves any number between is a median, and with weights scikit-learn takes the lower one.
            assert close or (name == "median" and weights is not None and _is_median(found[0, 0], labels, weights))


def _is_median(value: float, labels: list[float], weights: list[float]) -> bool:
    """Whether at most half of the weight is below and at most half above."""
    given, weight = np.array(labels), np.array(weights)
    step = 1e-3 + 1e-6 * abs(value)
    return max(weight[given < value - step].sum(), weight[given > value + step].sum()) <= weight.sum() / 2


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("median", CLASSES),
        ("rate:nothing", TABLE),
        ("rate:pace", TABLE),  # a number has no values to count
        ("rate:", TABLE),
        ("mean", TABLE),
        ("rate:pace", CLASSES),
    ],
)
def test_what_cannot_be_computed_is_refused(name: str, schema: Schema) -> None:
    with pytest.raises(ConfigError, match="cannot be computed"):
        check_baseline(name, schema)
