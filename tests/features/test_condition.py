"""Conditions on rows keep the rows that SQLite keeps, and say what they cannot read."""

from __future__ import annotations

import sqlite3
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.condition import Condition
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

SCHEMA = Schema.plain(
    {"n": "int64", "m": "int64", "x": "float32", "y": "float64", "country": "string", "ok": "bool", "a b": "string"}
)
INTEGERS = st.one_of(st.integers(-3, 3), st.sampled_from([2**53, 2**53 + 1, -(2**63), 2**63 - 1]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32, min_value=-4, max_value=4)
TEXTS = st.sampled_from(["", "DE", "de", "AT", "D_", "%", "ä", "D\nE"])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | INTEGERS,
            "m": st.none() | INTEGERS,
            "x": st.none() | FLOATS,
            "y": st.none() | FLOATS,
            "country": st.none() | TEXTS,
            "ok": st.none() | st.booleans(),
            "a b": st.none() | TEXTS,
        }
    ),
    max_size=12,
)
OPERATORS = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])


def quoted(text: str) -> str:
    return f"'{text}'"


@st.composite
def comparisons(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(["n", "m", "x", "y", "country", "`a b`", "ok"]))
    if column == "ok":
        return draw(st.sampled_from(["ok", "ok = TRUE", "ok <> FALSE", "ok IS NULL"]))
    if column in ("country", "`a b`"):
        values = TEXTS.filter(str.isascii).map(quoted)
        patterns = st.sampled_from(["'D%'", "'_E'", "'%'", "''", "'d%'"])
    elif column in ("n", "m"):
        values = st.one_of(INTEGERS.filter(lambda n: abs(n) < 2**63).map(str), st.sampled_from(["0.5", "-1.5", "1.0"]))
        patterns = st.nothing()
    else:
        values = st.sampled_from(["0", "1", "-2", "0.5", "-1.25", "1e-1", "3"])
        patterns = st.nothing()
    forms = ["compare", "turned", "between", "in", "null", "columns"] + ["like"] * (not patterns.is_empty)
    match draw(st.sampled_from(forms)):
        case "compare":
            return f"{column} {draw(OPERATORS)} {draw(values)}"
        case "turned":
            return f"{draw(values)} {draw(OPERATORS)} {column}"
        case "between":
            return f"{column} {draw(st.sampled_from(['', 'NOT ']))}BETWEEN {draw(values)} AND {draw(values)}"
        case "in":
            listed = ", ".join(draw(st.lists(values, min_size=1, max_size=4)))
            return f"{column} {draw(st.sampled_from(['', 'NOT ']))}IN ({listed})"
        case "null":
            return f"{column} IS {draw(st.sampled_from(['', 'NOT ']))}NULL"
        case "like":
            return f"{column} {draw(st.sampled_from(['', 'NOT ']))}LIKE {draw(patterns)}"
    pairs = {"n": "m", "m": "n", "x": "y", "y": "x", "country": "`a b`", "`a b`": "country"}
    return f"{column} {draw(OPERATORS)} {pairs[column]}"


CONDITIONS = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} AND {pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"{pair[0]} OR {pair[1]}"),
        inner.map(lambda one: f"NOT ({one})"),
    ),
    max_leaves=6,
)


def by_sqlite(rows: list[dict[str, Any]], condition: str) -> list[int]:
    with sqlite3.connect(":memory:") as connection:
        connection.execute("PRAGMA case_sensitive_like = ON")
        connection.execute("CREATE TABLE t (i, n, m, x, y, country, ok, `a b`)")
        values = [(i, *(row[field.name] for field in SCHEMA.fields[1:])) for i, row in enumerate(rows)]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        return [i for (i,) in connection.execute(f"SELECT i FROM t WHERE {condition} ORDER BY i")]


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"sample_id": i, **row} for i, row in enumerate(rows)], SCHEMA.arrow_schema())


@given(ROWS, CONDITIONS)
@settings(max_examples=400, deadline=None)
def test_a_condition_keeps_the_rows_that_sqlite_keeps(rows: list[dict[str, Any]], text: str) -> None:
    condition, data = Condition.parse(text, SCHEMA), batch(rows)
    wanted = by_sqlite(rows, text)
    assert condition.kept(data).column("sample_id").to_pylist() == wanted
    filtered = pa.Table.from_batches([data]).filter(condition.expression())  # as Arrow's datasets do
    assert sorted(filtered.column("sample_id").to_pylist()) == wanted
    again = Condition.parse(condition.text, SCHEMA)
    assert again.text == condition.text and again.kept(data).equals(condition.kept(data))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("u > 3", [2]),
        ("u >= 3.0", [1, 2]),
        ("u = 18446744073709551615", [2]),
        ("u < 0.5", [0]),
        ("u IN (0, 3)", [0, 1]),
    ],
)
def test_uint64_is_compared_exactly(text: str, kept: list[int]) -> None:
    schema = Schema.plain({"u": "uint64"})
    rows = [{"sample_id": i, "u": Decimal(value)} for i, value in enumerate([0, 3, 2**64 - 1])]
    data = pa.RecordBatch.from_pylist(rows, schema.arrow_schema())
    assert Condition.parse(text, schema).kept(data).column("sample_id").to_pylist() == kept


def test_nan_is_kept_by_no_comparison() -> None:
    schema = Schema.plain({"x": "float64"})
    rows = [{"sample_id": 0, "x": float("nan")}, {"sample_id": 1, "x": 1.0}]
    data = pa.RecordBatch.from_pylist(rows, schema.arrow_schema())
    for text, kept in (("x > 0", [1]), ("x < 2", [1]), ("NOT x > 0", [0]), ("x IS NULL", [])):
        assert Condition.parse(text, schema).kept(data).column("sample_id").to_pylist() == kept


def test_one_condition_in_other_writing_has_one_text() -> None:
    texts = ["n>1 and country in('DE')", "n  >  1 AND country IN ('DE') -- those", "n > 1 AND country IN ('DE')"]
    assert len({Condition.parse(text, SCHEMA).text for text in texts}) == 1
    assert Condition.parse(texts[0], SCHEMA).columns == ("n", "country")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 conditions"),
        ("-- none", "0 conditions"),
        ("n > (", "Required keyword"),
        ("n", "no comparison of a column"),
        ("1 = 1", "no comparison of a column"),
        ("coutry = 'DE'", "no column `coutry` (perhaps `country`)"),
        ("t.n > 1", "`t.n`, a name with a dot"),
        ("n > 'x'", "values that compare with n: int64"),
        ("country > 3", "values that compare with country: string"),
        ("ok = 1", "values that compare with ok: bool"),
        ("n + 1 > 2", "`n + 1`"),
        ("n = NULL", "IS NULL finds nulls"),
        ("n IN (SELECT 1)", "SELECT 1"),
        ("n > 1; DROP TABLE t", "2 conditions"),
        ("upper(country) = 'DE'", "UPPER"),
        ("country LIKE 3", "LIKE 3"),
        ("country ILIKE 'd%'", "ILIKE"),
        ("country LIKE 'd!%' ESCAPE '!'", "ESCAPE"),
        ("country RLIKE 'd'", "RLIKE"),
        ("n BETWEEN SYMMETRIC 3 AND 1", "SYMMETRIC"),
        ("n = ANY (SELECT 1)", "ANY"),
        ("n IN UNNEST(m)", "UNNEST"),
        ("NOT " * 1000 + "ok", "levels"),
        ("(" * 4000 + "ok" + ")" * 4000, "levels"),
        ("ok OR " * 2000 + "ok", "characters"),
        ("picture = 'x'", "no single value in a row"),
        ("u > n", "compares with constants only"),
    ],
)
def test_what_is_no_condition_is_refused_by_name(text: str, words: str) -> None:
    columns = {field.name: field.dtype for field in SCHEMA.fields[1:]} | {"picture": "bytes", "u": "uint64"}
    with pytest.raises(ConfigError) as caught:
        Condition.parse(text, Schema.plain(columns))
    assert words in str(caught.value) and "Correct --where" in str(caught.value)
    assert len(str(caught.value)) < 1500
