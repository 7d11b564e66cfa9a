"""A table behind JDBC becomes a dataset: Derby, whose jars lie in the pyspark wheel, through a catalog of Spark's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from lockstep.etl import tables
from lockstep.etl.tables import TableConfig
from lockstep.storage.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATALOG = "spark.sql.catalog.shop"
VISITS = (
    "id AS visit",
    "IF(id % 5 = 0, NULL, concat('né ', id)) AS visitor",
    "id / 3 AS ratio",
    "CAST(id + 0.25 AS DECIMAL(12, 2)) AS price",
    "timestamp_micros(1700000000000000 + id * 1000001) AS seen",
    "id % 2 = 0 AS bought",
)
QUERY = (
    "SELECT visit, visitor, ratio, CAST(price AS STRING) AS price, unix_micros(seen) AS seen, bought"
    " FROM shop.APP.visits WHERE visit < 30"
)


@pytest.mark.slow
def test_a_database_table_becomes_a_dataset(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.sparkContext._jvm is not None
    spark.sparkContext._jvm.java.lang.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    spark.conf.set(CATALOG, "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog")
    spark.conf.set(f"{CATALOG}.url", f"jdbc:derby:{tmp_path}/shop;create=true")
    spark.conf.set(f"{CATALOG}.driver", "org.apache.derby.iapi.jdbc.AutoloadedDriver")
    spark.range(0, 40, 1, 1).selectExpr(*VISITS).writeTo("shop.APP.visits").create()
    common: dict[str, Any] = {"id_columns": ("visit",), "label": "bought", "split": "1/1"}
    config = TableConfig(output=str(tmp_path / "out"), query=QUERY, fmt="parquet", **common)
    manifest = tables.run(spark, config)
    assert (manifest.counts.read, manifest.counts.written) == (30, 30)
    assert {field["name"]: field["dtype"] for field in manifest.schema["fields"]} == {
        "sample_id": "int64", "visit": "int64", "visitor": "string", "ratio": "float64", "price": "string",
        "seen": "int64", "bought": "bool",
    }  # fmt: skip
    found = ds.dataset(tmp_path / "out", format="parquet").to_table().drop_columns("sample_id").to_pylist()
    assert sorted(found, key=lambda row: row["visit"]) == [
        {
            "visit": n,
            "visitor": None if n % 5 == 0 else f"né {n}",
            "ratio": n / 3,
            "price": f"{n}.25",
            "seen": 1_700_000_000_000_000 + n * 1_000_001,
            "bought": n % 2 == 0,
        }
        for n in range(30)
    ]
    with pytest.raises(
        ConfigError, match=r"2 columns cannot be used\n.*`price`.*`seen`"
    ):  # whole, it has columns without a dtype
        tables.run(spark, TableConfig(output=str(tmp_path / "whole"), table="shop.APP.visits", **common))
    with pytest.raises(NotFoundError, match=r"shop\.APP\.nothing"):
        tables.run(spark, TableConfig(output=str(tmp_path / "none"), table="shop.APP.nothing", **common))
