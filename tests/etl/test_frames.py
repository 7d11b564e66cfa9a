"""Data frames of pandas and Spark as datasets: proposed schemas, nulls, classes; against pandas and scikit-learn."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import LabelEncoder

import lockstep
from lockstep.etl import tables
from lockstep.etl.columns import quoted
from lockstep.etl.frames import propose_schema
from lockstep.etl.tables import TableConfig
from lockstep.etl.write.frame import fault_of
from lockstep.etl.write.pandas_rows import arrow_columns
from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError, ExistsError
from lockstep.training.reading.open import OpenSplit
from tests.builders.blocks import read_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 240


def people() -> pd.DataFrame:
    """A frame with each nullable kind of pandas, a text of two values, and one of three."""
    n = np.arange(ROWS)
    return pd.DataFrame(
        {
            "row": n,
            "age": pd.array([None if i % 9 == 0 else int(i % 60) for i in n], dtype="Int64"),
            "hours": np.where(n % 7 == 0, np.nan, n % 50 / 3),
            "member": pd.array([None if i % 11 == 0 else bool(i % 2) for i in n], dtype="boolean"),
            "job": pd.Categorical([None if i % 8 == 0 else f"job {i % 5}" for i in n]),
            "town": pd.array([None if i % 10 == 0 else f"town {i % 13}" for i in n], dtype="string"),
            "small": (n % 100).astype(np.uint8),
            "grade": [("high", "low", "middle")[i // 2 % 3] for i in n],
            "income": ["<=50K" if i % 3 else ">50K" for i in n],
        }
    )


CELLS = {
    "Int64": st.integers(-5, 300),
    "float64": st.floats(-1e6, 1e6),
    "boolean": st.booleans(),
    "string": st.sampled_from(["a", "b", "c", "dd"]),
    "category": st.sampled_from(["x", "y"]),
    "int32": st.integers(-9, 9),
}


@settings(max_examples=40)
@given(st.data(), st.integers(2, 40))
def test_nulls_and_classes_of_any_frame_are_those_of_pandas(data: st.DataObject, rows: int) -> None:
    def column(kind: str) -> Any:
        cells = CELLS[kind] if kind == "int32" else st.none() | CELLS[kind]
        return pd.Series(data.draw(st.lists(cells, min_size=rows, max_size=rows)), dtype=kind)

    frame = pd.DataFrame({f"c{i}": column(kind) for i, kind in enumerate(CELLS)} | {"always": ["v"] * rows})
    frame["answer"] = data.draw(st.lists(st.sampled_from("pqr"), min_size=rows, max_size=rows).filter(one_of_two))
    schema = propose_schema(frame, label="answer", embeddings=data.draw(st.booleans()))
    found = {field.name: field for field in schema}
    for name in frame:
        if name in found and name != "answer":
            assert found[name].nullable == frame[name].isna().any(), name
        else:
            assert name == "answer" or frame[name].isna().all()
    label = schema.label
    assert label is not None and label.class_names is not None
    assert list(label.class_names) == LabelEncoder().fit(frame["answer"]).classes_.tolist()
    assert label.dtype == ("bool" if len(label.class_names) == 2 else "int64")


def one_of_two(values: list[str]) -> bool:
    return len(set(values)) > 1


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 1, 1, 0], ("bool", None)),
        ([True, False, True, True], ("bool", None)),
        ([0, 3, 1, 2], ("int64", 4)),
        ([-1, 1, 5, 2], ("int64", None)),
        ([0.5, 1.0, 2.0, 0.0], ("float64", None)),
        ([0.0, 1.0, 1.0, 0.0], ("bool", None)),
    ],
)
def test_a_label_of_numbers(values: list[Any], wanted: tuple[str, int | None]) -> None:
    frame = pd.DataFrame({"x": [1.0, 2, 3, 4], "y": values})
    label = propose_schema(frame, label="y")["y"]
    assert (label.kind, label.dtype, label.num_classes) == ("label", *wanted)
    Encoder(Schema((propose_schema(frame, label="y").id_field, label)), {})  # a model can be trained on it


@pytest.mark.parametrize(
    ("no", "yes"),
    [
        ("no", "yes"),
        ("nein", "ja"),
        ("non", "oui"),
        ("no", "sí"),
        ("no", "si"),
        ("false", "true"),
        ("n", "y"),
        ("0", "1"),
    ],
)
@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_known_words_are_no_and_yes_in_any_case(no: str, yes: str, case: Callable[[str], str]) -> None:
    for words in ((case(no), case(yes)), (no, yes.upper()), (no.upper(), yes)):
        frame = pd.DataFrame({"x": [1.0, 2, 3], "y": [words[1], words[0], words[1]]})
        label = propose_schema(frame, label="y")["y"]
        assert (label.dtype, label.class_names) == ("bool", words)


DAYS = pd.date_range("2026-10-03 09:05:07", periods=40, freq="29h")
FORMS = {
    "%d.%m.%Y": "dd.MM.yyyy",
    "%d.%m.%Y %H:%M": "dd.MM.yyyy HH:mm",
    "%d.%m.%Y %H:%M:%S": "dd.MM.yyyy HH:mm:ss",
    "%-d.%-m.%Y": "d.M.yyyy",
    "%d/%m/%Y": "dd/MM/yyyy",
    "%m/%d/%Y %H:%M": "MM/dd/yyyy HH:mm",
    "%-m/%-d/%Y": "M/d/yyyy",
    "%Y/%m/%d": "yyyy/MM/dd",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_looks_like_a_date_says_its_form(form: str, tmp_path: Path) -> None:
    texts = DAYS.strftime(form)
    assert (pd.to_datetime(texts, format=form.replace("%-", "%")).normalize() == DAYS.normalize()).all()
    propose_schema(pd.DataFrame({"x": range(40), "at": texts}), output=tmp_path / "s.toml")
    propose_schema(pd.DataFrame({"x": range(40), "at": [*texts[:-1], "later"]}), output=tmp_path / "other.toml")
    assert f"# Looks like dates: to_timestamp(at, '{FORMS[form]}') in a query" in (tmp_path / "s.toml").read_text()
    assert "Looks like" not in (tmp_path / "other.toml").read_text()


@pytest.mark.parametrize(
    "texts", [["1,5", "-2,25", "3"], ["1.234,5", "12,25", "1.000.000"], ["1,5", "2.5", "3"], ["a,5", "1,5"], ["3", "x"]]
)
def test_a_text_that_looks_like_decimal_commas_says_how_to_convert_it(texts: list[str], tmp_path: Path) -> None:
    """It does where pandas reads numbers by decimal=',', and by thousands='.' where there are points."""
    thousands = "." if any(re.fullmatch(r"\d{1,3}(\.\d{3})+(,\d+)?", text) for text in texts) else None
    theirs = pd.read_csv(io.StringIO("\n".join(["n", *texts])), sep=";", decimal=",", thousands=thousands)["n"]
    propose_schema(pd.DataFrame({"x": range(len(texts)), "n": texts}), output=tmp_path / "s.toml")
    text = (tmp_path / "s.toml").read_text()
    assert ("# Looks like numbers with a decimal comma" in text) == (theirs.dtype == "float64")
    if theirs.dtype == "float64":
        (sql,) = re.findall(r"CAST\((.*) AS DOUBLE\)", text)
        points = "replace(n, '.', '')" if thousands else "n"
        assert sql == f"replace({points}, ',', '.')"
        assert [float(one.replace(".", "").replace(",", ".")) for one in texts] == theirs.tolist()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0, 1, 1, 0], ""),
        ([0, 3, 1, 2], ""),
        ([-1, 1, 1, -1], "a number to predict; for yes or no make a boolean of it in a query: whether it is 1"),
        ([1, 2, 3, 1], "a number to predict; for 3 classes make whole numbers from 0 of it in a query: less 1"),
        ([0.0, 1.0, 2.0, 2.0], "a number to predict; for 3 classes make whole numbers from 0 of it in a query: less 0"),
        ([0.5, 1.0, 2.0, 0.0], ""),
        (["spam", "ham", "ham", "ham"], '"spam" is yes, the second by alphabet; for "ham" turn class_names round'),
        (["nein", "ja", "ja", "ja"], ""),
        (["no", "sí", "no", "no"], ""),
    ],
)
def test_what_a_label_is_taken_for_is_said(
    values: list[Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    propose_schema(pd.DataFrame({"x": [1.0, 2, 3, 4], "y": values}), label="y", output=tmp_path / "s.toml")
    comment = (tmp_path / "s.toml").read_text().split('name = "y"')[0].splitlines()[-2]
    said = "\n".join(caplog.messages)
    assert comment.endswith(words) and words in said
    assert bool(words) == ("label y: " in said)


@pytest.mark.parametrize(
    ("ids", "is_said"),
    [
        ([*range(20), 3], True),
        (["a", "b", "c"], True),
        ([n % 10 for n in range(40)], False),
        (["a", "b"] * 4, False),
    ],
)
def test_categories_that_differ_in_nearly_each_row_are_perhaps_ids(
    ids: list[Any], is_said: bool, tmp_path: Path
) -> None:
    propose_schema(pd.DataFrame({"id": ids, "y": 1.5}), label="y", output=tmp_path / "s.toml")
    text = (tmp_path / "s.toml").read_text()
    assert 'kind = "vocabulary"' in text
    assert (f"looks like an id: {len(set(ids))} of {len(ids)} values differ" in text) == is_said


def test_a_label_that_cannot_be_one_is_refused_by_name(tmp_path: Path) -> None:
    frame = people()
    for name, got in (("incme", "perhaps `income`"), ("age", "null"), ("town", "null")):
        with pytest.raises(ConfigError, match=f"`{name}` cannot be the label") as caught:
            propose_schema(frame, label=name)
        assert got in caught.value.got
    with pytest.raises(ConfigError, match="no data frame"):
        propose_schema([1, 2])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="nothing to propose"):
        propose_schema(frame.iloc[:0])
    late = pd.DataFrame({"x": range(20_000), "y": ["a"] * 15_000 + ["b"] * 4_999 + ["c"]})
    assert propose_schema(late, label="y")["y"].class_names == ("a", "b", "c"), "of all rows, not of the first"
    propose_schema(frame, label="income", output=tmp_path / "s.toml")
    assert load_schema(str(tmp_path / "s.toml")) == propose_schema(frame, label="income")
    with pytest.raises(ExistsError):
        propose_schema(frame, output=tmp_path / "s.toml")


def test_embeddings_are_fed_ids() -> None:
    tags: Any = [["a", "b"][: 1 + n % 2] for n in range(ROWS)]
    frame = people().assign(tags=tags)
    kinds = {field.name: field.encoding for field in propose_schema(frame, label="income", embeddings=True)}
    plain = {field.name: field.encoding for field in propose_schema(frame, label="income")}
    assert kinds["town"] is not None and kinds["town"]["output"] == "index" and "output" not in (plain["town"] or {})
    assert kinds["tags"] is not None and (kinds["tags"]["kind"], kinds["tags"]["length"]) == ("sequence", 2)
    assert plain["tags"] is not None and plain["tags"]["kind"] == "vocabulary"
    assert kinds["hours"] == plain["hours"], "numbers are the same"


def test_names_of_classes_belong_to_labels() -> None:
    for more in ({"dtype": "bool"}, {"dtype": "int64", "num_classes": 2}):
        field = Field(name="y", kind="label", class_names=("n", "y"), **more)
        assert Field.from_json(field.to_json()) == field
    for wrong in (
        {"dtype": "bool", "class_names": ("a", "b", "c")},
        {"dtype": "int64", "num_classes": 3, "class_names": ("a", "b")},
        {"dtype": "int64", "num_classes": 2, "class_names": ("a", "a")},
        {"dtype": "float32", "class_names": ("a", "b")},
        {"dtype": "bool", "class_names": ("a", "b"), "kind": "feature"},
    ):
        with pytest.raises(ConfigError, match="field `y`"):
            Field(name="y", **{"kind": "label", **wrong})  # type: ignore[arg-type]
    declared = '[[fields]]\nname = "y"\ndtype = "int64"\nkind = "label"\nclass_names = ["a", "b", "c"]\n'
    assert load_schema(declared)["y"].num_classes == 3


def fed(url: str) -> dict[str, Any]:
    """What a model is fed of both splits of a dataset."""
    parts = []
    for name in ("train", "test"):
        split = OpenSplit.at(url, name)
        raw = read_all(split.reader)
        parts.append(split.encoder.encode(raw).x)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


ANY_NAMES = ("land", "home town", "größe", "a/b", "a.b", "a`b", "1st", "a-b", "null", "true", "case", "interval")
CALLS = re.compile(
    r"(?:CAST|unix_[a-z]+|transform|flatten|map_values)\((?:`(?:[^`]|``)*`|[^()`]|\([^()]*\)|\([^()]*`[^()]*\))*\)"
)


def test_what_is_suggested_in_place_of_a_column_is_sql_of_that_column(spark: SparkSession) -> None:
    kinds = {
        "date": "DATE '2024-01-31'",
        "timestamp": "TIMESTAMP '2024-01-31 01:02:03'",
        "timestamp_ntz": "TIMESTAMP_NTZ '2024-01-31 01:02:03'",
        "decimal(6,2)": "CAST(1.5 AS DECIMAL(6,2))",
        "map<string,int>": "map('k', 1)",
        "array<array<int>>": "array(array(1, 2))",
    }
    words = spark.sql("SELECT keyword FROM sql_keywords()").toArrow().column(0).to_pylist()
    for kind, value in kinds.items():
        names = [*ANY_NAMES, *sorted({word.lower() for word in words if kind == "date"} - {*ANY_NAMES})]
        df = spark.sql(f"SELECT {value} AS plain, {', '.join(f'{value} AS {quoted(name)}' for name in names)}")
        calls = {name: suggested(name, kind) for name in ("plain", *names)}
        assert calls["plain"] and all(len(each) == len(calls["plain"]) for each in calls.values()), calls
        (row,) = df.selectExpr(*(call for each in calls.values() for call in each)).collect()
        assert None not in row and [*row] == [*row][: len(calls["plain"])] * len(calls), kind


def suggested(name: str, kind: str) -> list[str]:
    fault = fault_of(name, kind)
    assert fault is not None
    return CALLS.findall(fault.next_step.replace("ZONE", "UTC").replace("item -> ...", "item -> size(item)"))


@pytest.mark.slow
@pytest.mark.usefixtures("few_partitions")
def test_a_frame_becomes_a_dataset_without_a_schema_by_hand(spark: SparkSession, tmp_path: Path) -> None:
    frame = people()
    schema = propose_schema(frame, label="income", embeddings=True)
    url = str(tmp_path / "data")
    lockstep.write_dataset(frame, url, id_columns="row", schema=schema, fmt="parquet")
    written = ds.dataset(url, partitioning="hive").to_table().to_pandas().sort_values("row", ignore_index=True)
    assert written["income"].tolist() == (frame["income"] == ">50K").tolist()
    for name in ("age", "hours", "town", "small", "grade"):
        wanted, got = ([None if pd.isna(v) else v for v in each[name].tolist()] for each in (frame, written))
        assert got == wanted, name
    rows = fed(url)
    assert rows["town"].shape[1:] == (1,) and rows["town"].dtype == np.int64, "ids for an embedding"

    # Without a schema: what can be trained is, and what cannot is named at once.
    bare = frame.drop(columns="grade").assign(income=frame["income"] == ">50K")
    lockstep.write_dataset(bare, str(tmp_path / "bare"), id_columns="row", label="income")
    rows = fed(str(tmp_path / "bare"))
    assert sorted(rows["age"].ravel().tolist()) == sorted(frame["age"].fillna(0).astype(float).tolist())
    assert sorted(rows["hours"].ravel().tolist()) == sorted(frame["hours"].fillna(0).astype(np.float32).tolist())
    path: Any = [[1, 2]] * ROWS
    wrong = frame.assign(at=pd.Timestamp("2020-01-01"), path=path)
    with pytest.raises(ConfigError, match="3 columns cannot be used") as caught:
        lockstep.write_dataset(wrong, str(tmp_path / "wrong"), id_columns="row", label="income")
    assert all(f"`{name}`" in caught.value.got for name in ("at", "path", "income"))
    with pytest.raises(ConfigError, match="several types"):
        lockstep.write_dataset(frame.assign(x=[1, "a"] * (ROWS // 2)), str(tmp_path / "wrong"), id_columns="row")

    # What a proposal leaves out is not looked at; 0.0 and 1.0 are no and yes.
    mixed = frame.assign(x=[1, "a"] * (ROWS // 2), z=1 + 2j, income=(frame["income"] == ">50K").astype(float))
    closed = propose_schema(mixed, label="income", embeddings=True)
    assert closed["income"].dtype == "bool" and "x" not in [field.name for field in closed]
    lockstep.write_dataset(mixed, str(tmp_path / "closed"), id_columns="row", schema=closed, fmt="parquet")
    again = ds.dataset(tmp_path / "closed", partitioning="hive").to_table().to_pandas().sort_values("row")
    assert again["income"].tolist() == mixed["income"].astype(bool).tolist()
    assert (
        propose_schema(spark.createDataFrame(frame[["row"]].assign(y=[0.0, 1.0] * 120)), label="y")["y"].dtype == "bool"
    )
    late = spark.range(12_000).selectExpr("id", "CASE WHEN id = 11999 THEN 0.5D ELSE id % 2 * 1D END AS y")
    assert propose_schema(late, label="y")["y"].dtype == "float64", "of all rows"

    # The same schema for a table that has another class.
    other = frame.assign(income=["other" if n == 7 else text for n, text in enumerate(frame["income"])])
    with pytest.raises(DataError, match="none of its classes"):
        lockstep.write_dataset(other, str(tmp_path / "wrong"), id_columns="row", schema=schema)

    # A folder of Parquet and a table of the catalog, by the job's functions.
    pq.write_table(pa.table(arrow_columns(frame.drop(columns="row").assign(key=frame["row"]))), tmp_path / "p.parquet")
    where = (str(tmp_path / "p.parquet"),)
    toml = str(tmp_path / "proposed.toml")
    said = tables.propose(spark, TableConfig(output=toml, label="grade", proposes=True, id_columns=(), inputs=where))
    assert "9 fields from 240 rows, label grade" in said
    assert load_schema(toml)["grade"].class_names == ("high", "low", "middle")
    made = TableConfig(output=str(tmp_path / "graded"), schema=toml, id_columns=("key",), fmt="parquet", inputs=where)
    tables.run(spark, made)
    graded = ds.dataset(made.output, partitioning="hive").to_table().to_pandas().sort_values("key")
    assert graded["grade"].tolist() == LabelEncoder().fit_transform(frame["grade"]).tolist()
    spark.createDataFrame(frame[["row", "small", "income"]].astype({"small": "int64"})).createOrReplaceTempView(
        "people"
    )
    query = "SELECT *, current_date() AS today, CAST(small AS decimal(9,2)) AS price FROM people"
    config = TableConfig(output=str(tmp_path / "q.toml"), query=query, label="income", proposes=True, id_columns=())
    assert 'left out (the file says why): "today", "price"' in tables.propose(spark, config)
    assert "unix_date(today)" in Path(config.output).read_text()
    frame[["row", "small", "income"]].to_json(tmp_path / "p.json", orient="records", lines=True)
    given = (str(tmp_path / "p.json"),)
    config = TableConfig(
        output=str(tmp_path / "j.toml"), label="income", proposes=True, inputs=given, input_format="json", id_columns=()
    )
    assert "label income" in tables.propose(spark, config)
