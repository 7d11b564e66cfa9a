"""Raw rows of any form become the columns that an encoder takes, or an error says which column does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.features.schema.fields import Field
from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.results.predictor import ExportedModel, Predictor, prediction_column, raw_batch
from tests.training._visits import SCHEMA, visits

FIELDS = tuple(field for field in SCHEMA.features if field.name != "ip")


def test_any_form_of_rows_gives_the_same_columns() -> None:
    rows = visits(40)
    expected = raw_batch(rows, FIELDS)
    assert expected.column("sample_id").to_pylist() == list(range(40))
    frame = rows.to_pandas()
    assert frame["user"].dtype == float, "pandas has no nullable int64: NaN is null"
    exact = rows.to_pandas(integer_object_nulls=True)
    pixels = np.frombuffer(b"".join(rows.column("pixels").to_pylist()), np.uint8).reshape(40, 2, 2)
    as_dict: dict[str, Any] = {name: rows.column(name).to_pylist() for name in rows.schema.names}
    struct = pa.StructArray.from_arrays(rows.columns, rows.schema.names)
    table = pa.concat_tables([pa.Table.from_batches([rows.slice(0, 15)]), pa.Table.from_batches([rows.slice(15)])])
    for form in (exact, as_dict, as_dict | {"pixels": pixels}, as_dict | {"pixels": pixels.tolist()}, struct, table):
        assert raw_batch(form, FIELDS).equals(expected)
    nulls = rows.column("bytes").null_count
    assert raw_batch(frame[["bytes"]], (SCHEMA["bytes"],)).column("bytes").null_count == nulls > 0


@pytest.mark.parametrize(
    ("field", "values", "found"),
    [
        (Field(name="x", dtype="float32"), [1, 2], [1.0, 2.0]),
        (Field(name="x", dtype="float32"), np.array([1.5, np.nan]), [1.5, None]),  # NaN stays: the column has no null
        (Field(name="x", dtype="int64"), np.array([1.0, 2.0]), [1, 2]),
        (Field(name="x", dtype="string"), pd.Series(["a", "b"], dtype="category"), ["a", "b"]),
        (Field(name="x", dtype="uint64"), np.array([2**64 - 1], np.uint64), [2**64 - 1]),
        (Field(name="x", dtype="uint64"), [1, 2**64 - 1], [1, 2**64 - 1]),  # beyond the int64 that Arrow guesses
        (Field(name="x", dtype="float32", shape=(None,)), [[1, 2], []], [[1.0, 2.0], []]),
        (Field(name="x", dtype="string", shape=(None,)), pa.chunked_array([[["a"]], [[]]]), [["a"], []]),
        (Field(name="x", dtype="bytes"), pa.array([b"a"], pa.large_binary()), [b"a"]),
    ],
)
def test_a_column_is_cast_without_loss(field: Field, values: Any, found: list[Any]) -> None:
    column = raw_batch({"x": values}, (field,)).column("x")
    assert column.type == field.arrow_type and column.null_count == 0
    assert [None if value != value else value for value in column.to_pylist()] == found


@pytest.mark.parametrize(
    ("dtype", "shape", "values"),
    [
        ("int64", (), [1.5]),
        ("int64", (), ["7"]),
        ("int64", (), pd.Series(pd.to_datetime(["2026-11-23"]))),  # of which unit?
        ("string", (), [7]),
        ("bool", (), [1]),
        ("float32", (None,), [["1"]]),
        ("float32", (None,), [1.0]),
        ("uint8", (2,), np.zeros((3, 3), np.uint8)),
        ("uint8", (2,), [[1, 300]]),
        ("uint8", (2,), [b"123"]),
        ("uint8", (2,), pa.array([b"12", b"123"])),
        ("float32", (), [1e300]),
        ("float32", (None,), [[1e300]]),
        ("int64", (), [2**63]),
        ("float64", (), [10**400]),
        ("uint64", (), [-1]),
        ("uint64", (), [2**64]),
        ("float32", (2,), [[1e300, 0]]),
        ("float32", (2,), [[1j, 0]]),
        ("float32", (2,), [[None, 0]]),
        ("float32", (2,), [[10**400, 0]]),
    ],
)
def test_a_column_of_another_type_is_named(dtype: str, shape: tuple[int, ...], values: Any) -> None:
    with pytest.raises(ConfigError, match="column `x`") as caught:
        raw_batch({"x": values}, (Field(name="x", dtype=dtype, shape=shape),))
    assert caught.value.got and caught.value.next_step and dtype in caught.value.allowed


def test_missing_columns_nulls_and_other_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="lack columns") as caught:
        raw_batch({"Count": [1]}, FIELDS)
    assert "count (perhaps `Count`)" in caught.value.got and "pixels" in caught.value.got
    with pytest.raises(ConfigError, match="lack columns"):
        raw_batch({1: [1]}, FIELDS)
    with pytest.raises(DataError, match="column `count` is null"):
        raw_batch({"count": [1, None]}, (SCHEMA["count"],))
    with pytest.raises(DataError, match="column `x` is null"):
        raw_batch({"x": [b"12", None]}, (Field(name="x", dtype="uint8", shape=(2,)),))
    with pytest.raises(DataError, match="column `x` is null"):
        raw_batch({"x": [[1.0, None]]}, (Field(name="x", dtype="float32", shape=(None,)),))
    numbers = pa.array([1, 2])
    both: tuple[Any, ...] = (
        pd.DataFrame([[1, 2]], columns=["count", "count"]),
        pa.Table.from_arrays([numbers, numbers], ["count", "count"]),
        pa.StructArray.from_arrays([numbers, numbers], ["count", "count"]),
    )
    for rows in both:
        with pytest.raises(ConfigError, match="columns of the same name"):
            raw_batch(rows, (SCHEMA["count"],))
    named = raw_batch(pd.DataFrame({1: [7], "1 ": [8]}), (Field(name="1", dtype="int64"),))
    assert named.column("1").to_pylist() == [7]
    with pytest.raises(ConfigError, match="differ in length"):
        raw_batch({"count": [1, 2], "age": [1]}, (SCHEMA["count"], SCHEMA["age"]))
    with pytest.raises(ConfigError, match="no rows"):
        raw_batch([1, 2], FIELDS)


def test_a_batch_is_a_whole_number_of_rows() -> None:
    unused: Any = None
    predictor = Predictor(unused, FIELDS, unused)
    batches: tuple[Any, ...] = (0, -1, 1.5, "8", None)
    for batch in batches:
        with pytest.raises(ConfigError, match="a batch is invalid") as caught:
            predictor(visits(2), batch)
        assert caught.value.got == repr(batch)


def test_outputs_are_doubles_or_lists_or_refused() -> None:
    assert prediction_column(np.array([[0.5], [1.0]], np.float32), several=False).to_pylist() == [0.5, 1.0]
    assert prediction_column(np.array([0.5], np.float32), several=True).to_pylist() == [[0.5]]
    assert prediction_column(np.array([[1, 2], [3, 4]], np.float16), several=True).to_pylist() == [
        [1.0, 2.0],
        [3.0, 4.0],
    ]
    for outputs, several in ((np.zeros((2, 3)), False), ({"a": np.zeros(2)}, True), (np.zeros((2, 2, 2)), True)):
        with pytest.raises(ConfigError, match="the column of predictions"):
            prediction_column(outputs, several=several)


def test_the_fitted_file_is_that_of_the_fold_that_the_run_left_out() -> None:
    files = tuple(f"fitted-page.fold-{number}.json" for number in range(3))
    signature = Signature(features={}, label=None, num_classes=None)
    exported = ExportedModel("model", "", (*files, "fitted-bytes.json"), "logistic", "fold-0,fold-2", SCHEMA, signature)
    assert exported.fitted_name("page.json") == "page.fold-1.json"
    assert exported.fitted_name("bytes.json") == "bytes.json"
    with pytest.raises(DataError, match="several fitted files"):
        replace(exported, split="").fitted_name("page.json")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_an_infinite_value_of_a_fitted_mean_is_refused(dtype: str, values: list[float]) -> None:
    field = Field(name="x", dtype=dtype, encoding={"kind": "standardise", "file": "x.json"})
    plain = Field(name="x", dtype=dtype)
    assert len(raw_batch({"x": values}, (plain,))) == len(values)
    if not np.isinf(values).any():
        raw_batch({"x": values}, (field,))
        return
    with pytest.raises(DataError, match="`x` holds a value that is infinite"):
        raw_batch({"x": values}, (field,))
