"""uint64 through Spark: a table's decimals to shards of both forms and back, and what is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lockstep
from benchmarks.shared.arrays import split_arrays
from lockstep.etl.columns import ddl_of
from lockstep.etl.logs.formats import Form
from lockstep.etl.logs.parse import output_schema
from lockstep.etl.logs.records import RecordLines
from lockstep.etl.logs.values import Column
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST = 2**64 - 1
VALUES = [0, 1, 2**63 - 1, 2**63, MOST]
SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="id", dtype="int64"),
        Field(name="u", dtype="uint64", encoding={"kind": "standardise", "file": "u.json"}),
        Field(name="wide", dtype="uint64", encoding={"kind": "ignore"}),
        Field(name="l", dtype="uint64", shape=(None,), encoding={"kind": "ignore"}),
    )
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("18446744073709551615", MOST),
        ("-1", None),
        ("18446744073709551616", None),
        ("1.5", None),
        ("1.0", None),  # as for int64: a number with a fraction is written as none
        ("10000000000000000000000000", None),
    ],
)
def test_a_log_says_it_or_is_refused(text: str, value: int | None) -> None:
    columns = (Column("u", pa.uint64()), Column("l", pa.list_(pa.field("element", pa.uint64())), nullable=True))
    for form, line, asked, u in (
        (Form("tsv"), text, columns[:1], value),
        (Form("json"), f'{{"u": {text}, "l": [{text}, 7]}}', columns, value),
        (Form("json"), f'{{"u": 1, "l": [{text}, 7]}}', columns, 1),
    ):
        parser = RecordLines(form, asked)
        found = parser.parse(pa.array([line.encode(), b'{"u": 5}' if form.log_format == "json" else b"5"]), ["u"])
        ddl = ddl_of(output_schema(parser))
        assert ddl.endswith("`u` decimal(20,0)" + ", `l` array<decimal(20,0)>" * (len(asked) - 1))
        assert found.reasons.good.tolist() == [value is not None, True], line
        assert found.columns["u"][1].as_py() == 5 and found.columns["u"].type == pa.decimal128(20, 0)
        if value is not None:
            assert found.columns["u"][0].as_py() == u
            assert len(asked) == 1 or found.columns["l"].to_pylist() == [[value, 7], []]


@pytest.mark.slow
def test_from_a_parquet_file_of_others_to_shards_and_back(spark: SparkSession, tmp_path: Path) -> None:
    columns = {
        "id": pa.array(range(40)),
        "u": pa.array(VALUES * 8, pa.uint64()),
        "wide": pa.array(range(40)),  # int64, which Spark widens
        "l": pa.array([[], VALUES] * 20, pa.list_(pa.uint64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "theirs.parquet")
    df = spark.read.parquet(str(tmp_path / "theirs.parquet"))
    assert df.schema["u"].dataType.simpleString() == "decimal(20,0)"
    wanted = {n: (VALUES[n % 5], n, VALUES if n % 2 else []) for n in range(40)}
    for fmt in ("parquet", "tfrecord"):
        out = str(tmp_path / fmt)
        lockstep.write_dataset(df, out, id_columns=["id"], schema=SCHEMA, fmt=fmt, petastorm=fmt == "parquet")
        rows = spark.read.format(fmt).load(out).collect()
        assert {row["id"]: (row["u"], row["wide"], row["l"]) for row in rows} == wanted, fmt
        batches = [batch for split in load_dataset(out).splits for batch in split_arrays(out, split, 8)]
        found = {int(n): int(u) for batch in batches for n, u in zip(batch["id"], batch["u"], strict=True)}
        assert found == {n: u for n, (u, _, _) in wanted.items()}
    # Petastorm leaves unsigned numbers of 64 bits out without a word; it reads decimals.
    enable()
    from petastorm import make_batch_reader, make_reader

    with make_batch_reader(f"file://{tmp_path}/parquet/split=train", reader_pool_type="dummy") as reader:
        found = {int(n): int(u) for batch in reader for n, u in zip(batch.id, batch.u, strict=True)}
    assert len(found) > 20 and found.items() <= {n: u for n, (u, _, _) in wanted.items()}.items()
    with make_reader(f"file://{tmp_path}/parquet/split=train", reader_pool_type="dummy") as reader:
        assert {int(row.id): int(row.u) for row in reader} == found


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["-1", "18446744073709551616"])
def test_other_numbers_are_refused(spark: SparkSession, tmp_path: Path, wrong: str) -> None:
    rows = f"SELECT 1L AS id, CAST({wrong} AS DECIMAL(20,0)) AS u, 1L AS wide, array(CAST(1 AS DECIMAL(20,0))) AS l"
    with pytest.raises(DataError, match="`u` holds a number that is no uint64"):
        lockstep.write_dataset(spark.sql(rows), str(tmp_path / "d"), id_columns=["id"], schema=SCHEMA)
