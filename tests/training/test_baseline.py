"""Baselines from labels alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from features.schema import Field, Schema
from storage.errors import ConfigError
from tests.training._ring import run_ring
from training.baseline import Baseline, check_baseline
from training.comm import Communicator

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

    def __init__(self, labels: list[Any]) -> None:
        self.table = self
        self.num_blocks, self._labels = 10, labels

    def run(self, block: int) -> int:
        return block

    def read(self, run: int) -> pa.RecordBatch:
        pages = pa.array(["a", "b", None, None], pa.string())
        return pa.RecordBatch.from_arrays([pages, pa.array(self._labels)], names=["page", "label"])


def fitted(name: str, schema: Schema, labels: list[Any], num_ranks: int) -> list[Baseline]:
    def work(comm: Communicator) -> Baseline:
        baseline = Baseline(name, schema)
        reader: Any = Reader(labels)
        baseline.fit(reader, comm)
        return baseline

    return run_ring(num_ranks, work)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rates_of_values_are_smoothed_and_the_same_on_all_ranks(num_ranks: int) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(["b", None, "new", "a"])], names=["page"])
    for baseline in fitted("rate:page", TABLE, [True, False, True, False], num_ranks):
        # 10 rows each of a (all yes) and b (none), towards the mean 0.5 with the weight of 10 rows
        np.testing.assert_allclose(baseline.predict(rows, binary=True)[:, 0], [0.25, 0.5, 0.5, 0.75])


def test_majority_is_the_share_of_each_class() -> None:
    (first, _) = fitted("majority", CLASSES, [0, 2, 2, 2], 2)
    rows = pa.RecordBatch.from_arrays([pa.array([1.0, 2.0])], names=["pace"])
    np.testing.assert_allclose(first.predict(rows, binary=False), [[0.25, 0.0, 0.75]] * 2)
    (first, _) = fitted("majority", TABLE, [True, True, True, False], 2)
    np.testing.assert_allclose(first.predict(rows, binary=True), [[0.75]] * 2)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
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
