"""Files of a table: merged by name, or refused by name; partitions keep their text; times in nanoseconds."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import orc

from lockstep.etl import tables
from lockstep.etl.table_files import partition_values, read_files, text_of_partition
from lockstep.etl.table_json import why_refused
from lockstep.etl.tables import TableConfig
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.table_cases import make

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

slow = pytest.mark.slow


def rows_of(spark: SparkSession, urls: list[Path], file_format: str = "parquet") -> dict[int, dict[str, Any]]:
    """The rows by id, without nulls; times with a zone as microseconds."""
    df, _ = read_files(spark, [str(url) for url in urls], file_format, lambda name: True)
    made = [f"unix_micros(`{n}`) AS `{n}`" if kind == "timestamp" else f"`{n}`" for n, kind in df.dtypes]
    rows = [row.asDict(recursive=True) for row in df.selectExpr(*made).collect()]
    return {row.pop("id"): {name: value for name, value in row.items() if value is not None} for row in rows}


def compare(spark: SparkSession, folder: Path, seed: int) -> bool:
    """Read a generated table; returns whether it was read, and not refused by the right names."""
    case = make(folder, seed)
    if case.refused:
        with pytest.raises(ConfigError) as caught:
            rows_of(spark, [folder], case.file_format)
        assert all(word in str(caught.value) for word in case.refused), (seed, str(caught.value), case.refused)
        return False
    wanted = {one: {n: v for n, v in row.items() if v is not None} for one, row in case.rows.items()}
    found = rows_of(spark, [folder], case.file_format)
    found = {
        one: {n: bytes(v) if isinstance(v, bytearray) else v for n, v in row.items()} for one, row in found.items()
    }
    assert found == wanted, seed
    return True


@slow
@pytest.mark.parametrize("file_format", ["parquet", "orc"])
def test_decimals_of_several_sizes_are_those_of_pyarrows_promoted_type(
    spark: SparkSession, file_format: str, tmp_path: Path
) -> None:
    kinds = [pa.decimal128(6, 2), pa.decimal128(7, 2), pa.decimal128(20, 2), pa.decimal128(12, 5), pa.decimal128(3, 0)]
    for number, kind in enumerate(kinds):
        digits = kind.precision - kind.scale
        values = [decimal.Decimal(10**digits - 1), decimal.Decimal(-1).scaleb(-kind.scale), None]
        part = pa.table({"id": [3 * number, 3 * number + 1, 3 * number + 2], "price": pa.array(values, kind)})
        (pq.write_table if file_format == "parquet" else orc.write_table)(part, tmp_path / f"{number}.{file_format}")
    schemas = [pa.schema([("id", pa.int64()), ("price", kind)]) for kind in kinds]
    wanted = pa.unify_schemas(schemas, promote_options="permissive")
    df, _ = read_files(spark, [str(tmp_path)], file_format, lambda name: True)
    found = df.toArrow().sort_by("id")
    assert found.schema.field("price").type == wanted.field("price").type
    files = [ds.dataset(tmp_path / f"{n}.{file_format}", format=file_format).to_table() for n in range(len(kinds))]
    assert found.column("price").to_pylist() == [value for one in files for value in one.column("price").to_pylist()]
    too_large = pa.table({"id": [99], "price": pa.array([decimal.Decimal("0.5")], pa.decimal128(38, 30))})
    (pq.write_table if file_format == "parquet" else orc.write_table)(too_large, tmp_path / f"z.{file_format}")
    with pytest.raises(ConfigError, match="`price` has two types"):
        read_files(spark, [str(tmp_path)], file_format, lambda name: True)


@slow
def test_generated_tables_have_the_rows_of_pyarrow(spark: SparkSession, tmp_path: Path) -> None:
    read = [compare(spark, tmp_path / str(seed), seed) for seed in range(20)]
    assert 8 < sum(read) < 20


@pytest.mark.soak
def test_many_generated_tables_have_the_rows_of_pyarrow(spark: SparkSession, tmp_path: Path) -> None:
    read = [compare(spark, tmp_path / str(seed), seed) for seed in range(20, 220)]
    assert 80 < sum(read) < 190


@slow
@pytest.mark.usefixtures("few_partitions")
@pytest.mark.parametrize("file_format", ["parquet", "orc"])
def test_a_column_of_later_files_is_kept_and_told(
    spark: SparkSession, file_format: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write = pq.write_table if file_format == "parquet" else orc.write_table
    folder = tmp_path / "in"
    folder.mkdir()
    write(pa.table({"id": range(50), "x": [1.0] * 50}), folder / f"2023.{file_format}")
    write(pa.table({"price": [n / 2 for n in range(50)], "id": range(50, 100)}), folder / f"2024.{file_format}")
    told: dict[str, Any] = {"id_columns": ("id",), "split": "1/1", "fmt": "parquet"}
    for name, given_by in (
        ("files", {"inputs": (str(folder),), "input_format": file_format}),
        ("query", {"query": f"SELECT * FROM {file_format}.`{folder}`"}),
    ):
        url = str(tmp_path / name)
        with caplog.at_level(logging.WARNING):
            tables.run(spark, TableConfig(output=url, **given_by, **told))
        found = ds.dataset(url).to_table(columns=["id", "x", "price"]).to_pandas().sort_values("id", ignore_index=True)
        wanted = pd.concat([pd.DataFrame({"id": range(50), "x": 1.0}), pd.DataFrame({"id": range(50, 100)})])
        wanted["price"] = [None] * 50 + [n / 2 for n in range(50)]
        pd.testing.assert_frame_equal(found, wanted.reset_index(drop=True).astype({"price": float}))
    lines = [line for line in caplog.messages if line.startswith("input: column")]
    assert [line.split(",")[0] for line in lines[:2]] == [
        "input: column `x` is null in 1 of 2 files",
        "input: column `price` is null in 1 of 2 files",
    ]


@slow
def test_two_types_are_refused_by_both_files_unless_the_column_is_excluded(spark: SparkSession, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "x": [1.0], "h": pa.array([1], pa.float16())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [2], "x": ["1"]}), tmp_path / "b.parquet")
    told: dict[str, Any] = {"inputs": (f"{tmp_path}/*.parquet",), "id_columns": ("id",), "split": "1/1"}
    with pytest.raises(ConfigError, match="`x` has two types") as caught:
        tables.run(spark, TableConfig(output=str(tmp_path / "out"), **told, exclude=("h",)))
    assert "double in file:" in caught.value.got and "string in file:" in caught.value.got
    assert "a.parquet" in caught.value.got and "b.parquet" in caught.value.got
    with pytest.raises(ConfigError, match="column `none` cannot be used"):
        tables.run(spark, TableConfig(output=str(tmp_path / "out"), **told, exclude=("h", "x", "none")))
    df, left_out = tables.frame(spark, TableConfig(output="out", **told, exclude=("h", "x")))
    assert df.columns == ["id"] and left_out == {"h", "x"}
    (tmp_path / "c.parquet").touch()
    with pytest.raises(DataError, match=r"c\.parquet cannot be read as Parquet"):
        tables.run(spark, TableConfig(output=str(tmp_path / "out"), **told, exclude=("h", "x")))


def partitioned(folder: Path, name: str, values: list[str]) -> Path:
    """A table with a folder for each value."""
    for number, value in enumerate(values):
        part = folder / f"{name}={value}"
        part.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number], "y": [number % 2]}), part / "a.parquet")
    return folder


@slow
def test_the_caller_talks_to_java_over_the_connection_it_had(spark: SparkSession, tmp_path: Path) -> None:
    """Another one is another thread of Java, where no session is active, so that `format("tfrecord")` is unknown."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    spark.createDataFrame([(1,)], "a int")  # makes the session active in this thread of Java
    thread = jvm.java.lang.Thread.currentThread().getName()
    df, _ = read_files(spark, [str(tmp_path)], "parquet", lambda name: True)
    assert jvm.java.lang.Thread.currentThread().getName() == thread
    df.write.format("tfrecord").mode("append").save(str(tmp_path / "out"))
    assert spark.read.format("tfrecord").load(str(tmp_path / "out")).count() == 2


@slow
def test_partitions_keep_their_text(spark: SparkSession, tmp_path: Path) -> None:
    cases: list[tuple[list[str], str, list[Any]]] = [
        (["007", "042", "100"], "string", ["007", "042", "100"]),
        (["7", "42", "100"], "bigint", [7, 42, 100]),
        (["7", "__HIVE_DEFAULT_PARTITION__"], "bigint", [7, None]),
        (["2024-01-31", "2024-02-01"], "date", [dt.date(2024, 1, 31), dt.date(2024, 2, 1)]),
        (["0.5", "-1.25"], "double", [0.5, -1.25]),
        (["1e3", "1.50", "+1"], "string", ["1e3", "1.50", "+1"]),
        (["a%3Ab", "c d"], "string", ["a:b", "c d"]),
    ]
    for number, (values, kind, wanted) in enumerate(cases):
        folder = partitioned(tmp_path / str(number), "store", values)
        df, _ = read_files(spark, [str(folder)], "parquet", lambda name: True)
        assert dict(df.dtypes)["store"] == kind
        assert [row["store"] for row in df.orderBy("id").collect()] == wanted
    query = TableConfig(output="out", query=f"SELECT * FROM parquet.`{tmp_path / '0'}`", id_columns=("id",))
    with pytest.raises(ConfigError, match=r"store=\.\.\. as int, which changes them") as caught:
        tables.frame(spark, query)
    assert caught.value.got == "store=007"
    path = tmp_path / "n.parquet"
    pq.write_table(pa.table({"id": pa.array([1], pa.timestamp("ns"))}), path)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        tables.frame(spark, TableConfig(output="out", query=f"SELECT * FROM parquet.`{path}`", id_columns=("id",)))
    assert "nanosAsLong" in caught.value.next_step
    same = TableConfig(output="out", query=f"SELECT store + 1 AS s FROM parquet.`{tmp_path / '1'}`", id_columns=("id",))
    assert sorted(row["s"] for row in tables.frame(spark, same)[0].collect()) == [8, 43, 101]


@given(st.text("0123456789-+e.a", min_size=1, max_size=12) | st.integers().map(str) | st.dates().map(str))
def test_a_partition_is_a_number_or_date_only_if_nothing_is_lost(value: str) -> None:
    if text_of_partition("bigint", value):
        assert str(int(value)) == value and -(1 << 63) <= int(value) < 1 << 63
    elif value.lstrip("-").isdigit() and abs(int(value)) < 10**18:
        assert str(int(value)) != value
    if text_of_partition("date", value) and value[:4] != "0000" and int(value[8:]) <= 28:
        assert str(dt.date.fromisoformat(value)) == value
    if text_of_partition("double", value):
        assert repr(float(value)) == value
    assert text_of_partition("string", value)
    assert partition_values([f"file:///x=1/in/x={value}/a"], "x") == {value}


@slow
def test_times_in_nanoseconds_are_rounded_down(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    moments = pd.to_datetime([1999, -1, 1_700_000_000_123_456_789], unit="ns", utc=True)
    path = tmp_path / "n.parquet"
    pd.DataFrame({"id": [0, 1, 2], "seen": moments, "local": moments.tz_localize(None)}).to_parquet(path)
    with caplog.at_level(logging.WARNING):
        found = rows_of(spark, [path])
    assert [found[n]["seen"] for n in range(3)] == [1, -1, 1_700_000_000_123_456]
    assert [found[n]["local"] for n in range(3)] == list(moments.floor("us").tz_localize(None).to_pydatetime())
    assert [line for line in caplog.messages if "nanoseconds" in line] == [
        "input: the times of `seen`, `local` are in nanoseconds, rounded down to microseconds"
    ]
    told: dict[str, Any] = {"inputs": (str(path),), "id_columns": ("id",), "split": "1/1", "fmt": "parquet"}
    tables.run(spark, TableConfig(output=str(tmp_path / "out"), **told, exclude=("seen", "local")))
    assert set(ds.dataset(tmp_path / "out").schema.names) == {"sample_id", "id"}


def refusal(spark: SparkSession, path: Path, file_format: str, *, by_query: bool = False) -> str:
    """What a job over a path says instead of reading it."""
    given_by: dict[str, Any] = {"inputs": (str(path),), "input_format": file_format}
    if by_query:
        given_by = {"query": f"SELECT * FROM {file_format}.`{path}`"}
    with pytest.raises((ConfigError, DataError)) as caught:
        tables.frame(spark, TableConfig(output="out", id_columns=("id",), **given_by))
    return str(caught.value)


@slow
@pytest.mark.parametrize("file_format", ["parquet", "orc", "json"])
def test_no_file_below_a_folder_is_left_out(spark: SparkSession, file_format: str, tmp_path: Path) -> None:
    def write(name: str, one: int) -> None:
        path = tmp_path / f"{name}.{file_format}"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame({"id": [one]})
        match file_format:
            case "json":
                frame.to_json(path, orient="records", lines=True)
            case _:
                getattr(frame, f"to_{file_format}")(path)

    def ids(name: str) -> list[int]:
        df, _ = read_files(spark, [str(tmp_path / name)], file_format, lambda name: True)
        return sorted(int(row[0]) for row in df.collect())

    for one, name in enumerate(["plain/a", "plain/b/a", "plain/b/c/a", "plain/_hidden/a", "plain/.b/a", "below/a/a"]):
        write(name, one)
    assert ids("plain") == [0, 1, 2] and ids("below") == [5]
    for one, name in enumerate(["mixed/day=1x/a", "mixed/day=2x/a", "mixed/old", "mixed/old 2"]):
        write(name, one)
    for by_query in (False, True):
        said = refusal(spark, tmp_path / "mixed", file_format, by_query=by_query)
        assert f"2 of 4 files: file:{tmp_path}/mixed/old 2.{file_format}" in said and "day=" not in said.splitlines()[1]
    said = refusal(spark, tmp_path / "plain", file_format, by_query=True)
    assert "2 of 3 files" in said and "plain/b/c/a" in said and "--input" in said


@slow
@pytest.mark.parametrize("file_format", ["parquet", "orc", "json"])
def test_a_partition_never_replaces_a_column(spark: SparkSession, file_format: str, tmp_path: Path) -> None:
    for number in (1, 2):
        part = tmp_path / f"Shop={number}"
        part.mkdir()
        frame, path = pd.DataFrame({"id": [number], "shop": [100 * number]}), part / f"a.{file_format}"
        if file_format == "json":
            frame.to_json(path, orient="records", lines=True)
        else:
            getattr(frame, f"to_{file_format}")(path)
    for by_query in (False, True):
        said = refusal(spark, tmp_path, file_format, by_query=by_query)
        assert "column `shop`" in said and "folders Shop=..." in said
    df, _ = read_files(spark, [str(tmp_path / "Shop=2")], file_format, lambda name: True)
    assert [row.shop for row in df.collect()] == [200]
    if file_format != "json":  # an excluded column of files is not read, so nothing is replaced
        df, left_out = read_files(spark, [str(tmp_path)], file_format, lambda name: name != "shop")
        assert sorted(row.Shop for row in df.collect()) == [1, 2] and left_out == {"shop"}


GOOD_LINES = [
    '{"id": 0, "t": "} {", "x": 1e308}',
    "",
    '  {"id": 1, "t": "\\ud83d\\ude00", "x": {"a": {}}} \t',
    '{"id": 2, "t": "1e400 \\\\ud83d", "x": -Infinity}',
    '[{"id": 3}, {"id": 4}]',
]
BAD_LINES = {
    '{"id": 9} {"id": 10}': "text behind",
    '{"id": 9}, {"id": 10}': "text behind",
    '{"id": 9}{"id": 10}': "text behind",
    '{"id": 9, "x": {"a": 1}}}': "text behind",
    '{"id": 9} garbage': "text behind",
    '[{"id": 9}] {"id": 10}': "text behind",
    '{"id": 9, "t": "\\ud83d"}': "half of a surrogate pair",
    '{"id": 9, "t": ["a", {"\\uDe00": 1}]}': "half of a surrogate pair",
    '{"id": 9, "x": 1e400}': "too large",
    '{"id": 9, "x": [-1E+400]}': "too large",
    f'{{"id": 9, "x": {"9" * 400}}}': "too large",
    '{"id": 9': "not JSON",
}


@slow
def test_json_lines_are_read_whole_or_refused(spark: SparkSession, tmp_path: Path) -> None:
    good = tmp_path / "[good]" / "a.json"
    good.parent.mkdir()
    good.write_text("\n".join(GOOD_LINES))
    df, _ = read_files(spark, [str(tmp_path)], "json", lambda name: True)
    assert sorted(row.id for row in df.collect()) == list(range(5))
    for number, (line, reason) in enumerate(BAD_LINES.items()):
        path = tmp_path / f"{number}.json"
        path.write_text("\n".join([*GOOD_LINES, line]))
        said = refusal(spark, path, "json")
        assert reason in said and path.name in said and line[:50] in said
    assert "text behind" in refusal(spark, tmp_path / "0.json", "json", by_query=True)


PIECES = st.sampled_from(["a", "\ud83d", "\U0001f600", "}", '"', "\\", "1e400", "NaN"])
TEXTS = st.lists(PIECES, max_size=4).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(10**300), 10**300) | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=5)


@given(st.dictionaries(TEXTS, VALUES), st.sampled_from(["", " ", "\t", ",", "}", "x", ' {"id": 1}']))
def test_a_json_line_is_refused_for_what_would_be_lost(value: dict[str, Any], behind: str) -> None:
    reason = why_refused((json.dumps(value) + behind).encode())
    if behind.strip():
        assert reason == "text behind the first value"
    else:
        assert reason == ("half of a surrogate pair" if "\\ud83d" in repr(value) else None)


@slow
def test_layouts_that_spark_refuses_are_said_in_our_words(spark: SparkSession, tmp_path: Path) -> None:
    for part in ("other/a=1", "other/b=2", "deep/a=1", "deep/x/a=1"):
        (tmp_path / part).mkdir(parents=True)
        pd.DataFrame({"id": [1]}).to_parquet(tmp_path / part / "f.parquet")
    (tmp_path / "hidden").mkdir()
    pd.DataFrame({"id": [1]}).to_parquet(tmp_path / "hidden" / "_f.parquet")
    for folder, told in (("other", "NAME=VALUE"), ("deep", "NAME=VALUE"), ("hidden", "neither `_` nor `.`")):
        for by_query in (False, True):
            said = refusal(spark, tmp_path / folder, "parquet", by_query=by_query)
            assert told in said and str(tmp_path / folder) in said and "SQLSTATE" not in said, said
            assert "spark.sql.catalog" not in said, "the next step is about files"
