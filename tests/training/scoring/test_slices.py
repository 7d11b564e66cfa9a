"""Slices of rows against pandas and scikit-learn, at several numbers of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, roc_auc_score

from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.comm import Communicator
from lockstep.training.comm.base import SoloCommunicator
from lockstep.training.scoring.scores import OutputForm, gathered_on_first
from lockstep.training.scoring.slices import (
    MISSING,
    MOST_SLICES,
    MOST_VALUES,
    OTHER,
    SliceBy,
    SliceColumn,
    metrics_of_slices,
    rows_of_slices,
    slices_of,
)
from tests.training._ring import run_ring, run_solo

SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="page", dtype="string", nullable=True),
        Field(name="seen", dtype="int64", nullable=True),
        Field(name="a:day", dtype="float32"),
        Field(name="pixels", dtype="uint8", shape=(2, 2)),
        Field(name="click", dtype="bool", kind="label"),
    )
)
FORM = OutputForm(logits=False, width=1)


def collected(by: SliceBy, values: pa.Array, comm: Communicator, batch: int = 7) -> tuple[Any, list[str]]:
    """This rank's share of a column, taken in batches and agreed on."""
    column, share = SliceColumn(by), -(-len(values) // comm.num_ranks)
    mine = values.slice(comm.rank * share, share)
    for start in range(0, len(mine), batch):
        column.take(pa.RecordBatch.from_arrays([mine.slice(start, batch)], [by.column]))
    return column.agreed(comm)


def slices(by: SliceBy, values: pa.Array) -> dict[str, Any]:
    """Name -> rows of each slice, by one rank."""
    found, names = collected(by, values, SoloCommunicator())
    return dict(rows_of_slices(by, found, names))


def test_names_of_slices_are_checked() -> None:
    found = slices_of(["page", "seen", "seen:day", "seen:hour", "a:day", "click", "sample_id"], SCHEMA)
    assert [(by.column, by.is_text, by.time) for by in found[:5]] == [
        ("page", True, None), ("seen", False, None), ("seen", False, "day"), ("seen", False, "hour"),
        ("a:day", False, None),
    ]  # fmt: skip
    for name in ("pixels", "pag", "seen:week", "page:day", "a:day:day", ""):
        with pytest.raises(ConfigError, match="no slices by"):
            slices_of([name], SCHEMA)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_most_frequent_texts_are_slices_and_the_others_one_more(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    texts = [None if n == 2 else f"page {n}" for n in rng.zipf(1.3, 500).clip(max=60)]
    (by,), values = slices_of(["page"], SCHEMA), pa.array(texts, pa.string())

    def one(comm: Communicator) -> Any:
        found, names = collected(by, values, comm)
        return gathered_on_first(np.stack([np.arange(len(found)) + 1000 * comm.rank, found], axis=1), comm), names

    answers = (run_ring if num_ranks > 1 else run_solo)(num_ranks, one)
    table, names = answers[0][0], answers[0][1]
    assert all(names == others for _, others in answers)
    found = {name: int(mask.sum()) for name, mask in rows_of_slices(by, table[:, 1], names)}
    counts = pd.Series(texts).value_counts(dropna=False)
    counts.index = counts.index.where(counts.index.notna(), MISSING)
    largest = {str(name): int(count) for name, count in counts.items() if count > counts.iloc[MOST_SLICES]}
    assert {name: found[name] for name in largest} == largest
    assert len(found) == MOST_SLICES + 1 and sum(found.values()) == 500
    assert found[OTHER] == counts.iloc[MOST_SLICES:].sum()


def test_numbers_are_cut_into_quartiles_and_few_values_are_slices() -> None:
    (by,) = slices_of(["seen"], SCHEMA)
    numbers = np.random.default_rng(1).permutation(400)
    found = slices(by, pa.array([*numbers, None]))
    assert list(found) == ["0 to 99", "100 to 199", "200 to 299", "300 to 399", MISSING]
    cut = pd.qcut(pd.Series(numbers), 4, labels=False).to_numpy()
    for number, mask in enumerate(list(found.values())[:4]):
        np.testing.assert_array_equal(mask[:-1], cut == number)
    found = slices(by, pa.array([3, 1, 3, -2]))
    assert {name: mask.sum() for name, mask in found.items()} == {"-2": 1, "1": 1, "3": 2}
    assert slices(by, pa.array([None], pa.int64())).keys() == {MISSING}
    most_equal = slices(by, pa.array([5] * 100 + list(range(6, 30))))  # three quartiles end at 5
    assert {name: int(mask.sum()) for name, mask in most_equal.items()} == {"5 to 5": 100, "6 to 29": 24}


@pytest.mark.parametrize("scale", [1, 10**3, 10**6, 10**9])
def test_times_are_cut_by_day_and_by_hour(scale: int) -> None:
    day, hour = slices_of(["seen:day", "seen:hour"], SCHEMA)
    times = pd.date_range("2026-01-30T22:15", periods=50, freq="h")
    column = pa.array([*(times.astype("datetime64[s]").astype(np.int64) * scale), None], pa.int64())
    assert {name: int(mask.sum()) for name, mask in slices(day, column).items()} == {
        **times.strftime("%Y-%m-%d").value_counts(sort=False).to_dict(), MISSING: 1,
    }  # fmt: skip
    by_hour = times.strftime("%H:00").value_counts().to_dict()
    assert {name: int(mask.sum()) for name, mask in slices(hour, column).items()} == {**by_hour, MISSING: 1}
    many = slices(day, pa.array((np.arange(30) * 86_400 + 10**9).tolist()))
    assert len(many) == MOST_SLICES + 1 and many[OTHER].sum() == 30 - MOST_SLICES


def test_a_column_of_too_many_texts_is_refused_on_every_rank() -> None:
    (by,) = slices_of(["page"], SCHEMA)
    for values, num_ranks in ((MOST_VALUES + 1, 1), (MOST_VALUES + 2, 2)):  # on each of two ranks it is half

        def one(comm: Communicator, values: int = values) -> str:
            with pytest.raises(DataError, match="too many values") as caught:
                collected(by, pa.array([str(n) for n in range(values)]), comm, batch=4096)
            return caught.value.what

        assert len(set((run_ring if num_ranks > 1 else run_solo)(num_ranks, one))) == 1


def test_metrics_of_a_slice_are_those_of_its_rows() -> None:
    rng = np.random.default_rng(2)
    labels, outputs, page = rng.integers(0, 2, 300), rng.random(300), rng.integers(0, 3, 300)
    rows = np.stack([labels, np.ones(300), outputs, rng.random(300)], axis=1)
    by = slices_of(["seen"], SCHEMA)[0]
    found = metrics_of_slices(by, page.astype(np.float64), [], rows, [], FORM, None, "majority")
    assert [one["value"] for one in found] == ["0", "1", "2"]
    for number, one in enumerate(found):
        mine = page == number
        auc, of_baseline = (roc_auc_score(labels[mine], rows[mine, column]) for column in (2, 3))
        assert one["samples"] == mine.sum() and one["class_counts"] == np.bincount(labels[mine]).tolist()
        assert one["metrics"]["roc_auc"] == pytest.approx(auc, abs=1e-12)
        assert one["baseline"]["metrics"]["roc_auc"] == pytest.approx(of_baseline, abs=1e-12)
        assert one["difference"]["roc_auc"]["value"] == pytest.approx(auc - of_baseline, abs=1e-12)
        low, high = one["intervals"]["roc_auc"]
        assert low < auc < high


def test_slices_of_numbers_have_errors_with_intervals() -> None:
    rng = np.random.default_rng(4)
    labels, outputs = rng.integers(0, 6, 50).astype(float), rng.normal(size=50)
    values = (labels > 1).astype(float)  # one slice has only the labels 0 and 1
    rows = np.stack([labels, np.ones(50), outputs], axis=1)
    found = metrics_of_slices(slices_of(["seen"], SCHEMA)[0], values, [], rows, [], FORM, None, None)
    for one, mine in zip(found, (values == 0, values == 1), strict=True):
        assert one["metrics"] == {
            "mean_absolute_error": pytest.approx(mean_absolute_error(labels[mine], outputs[mine])),
            "mean_squared_error": pytest.approx(mean_squared_error(labels[mine], outputs[mine])),
            "root_mean_squared_error": pytest.approx(mean_squared_error(labels[mine], outputs[mine]) ** 0.5),
            "r2": pytest.approx(r2_score(labels[mine], outputs[mine])),
        }
        assert one["intervals"]["mean_absolute_error"][0] < one["metrics"]["mean_absolute_error"]
