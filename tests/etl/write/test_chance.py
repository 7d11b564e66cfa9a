"""Rows that differ each time they are computed: refused where the plan shows it, noticed where it does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow.dataset as ds
import pytest

import lockstep
from lockstep.etl import tables
from lockstep.etl.tables import TableConfig
from lockstep.etl.write import shards
from lockstep.etl.write.chance import chance_in
from lockstep.storage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_partitions")]
CHANCE = {
    "SELECT * FROM numbers TABLESAMPLE (10 PERCENT)": "sample",
    "SELECT * FROM numbers TABLESAMPLE (10 PERCENT) REPEATABLE (3)": "sample",
    "SELECT * FROM numbers TABLESAMPLE (BUCKET 1 OUT OF 10)": "sample",
    "SELECT * FROM numbers TABLESAMPLE (5 ROWS)": "LIMIT",
    "WITH some AS (SELECT * FROM numbers TABLESAMPLE (10 PERCENT)) SELECT * FROM some": "sample",
    "SELECT * FROM numbers WHERE id IN (SELECT id FROM numbers TABLESAMPLE (10 PERCENT))": "sample",
    "SELECT * FROM numbers WHERE id > (SELECT max(x) FROM (SELECT rand() AS x FROM numbers))": "chance",
    "SELECT * FROM numbers ORDER BY rand(7) LIMIT 5": "chance",
    "SELECT *, monotonically_increasing_id() AS x FROM numbers": "chance",
    "SELECT *, current_timestamp() > DATE'2000-01-01' AS x FROM numbers": "clock",
    "SELECT * FROM numbers LIMIT 5": "LIMIT",
    "SELECT * FROM numbers OFFSET 5": "LIMIT",
    "SELECT m, any_value(id) AS id FROM numbers GROUP BY m": "any_value",
    "SELECT m, first(id) FILTER (WHERE id > 3) AS id FROM numbers GROUP BY m": "first",
    "SELECT * FROM numbers PIVOT (last(id) FOR m IN (1, 2))": "last",
    "SELECT m, collect_list(id) AS ids FROM numbers GROUP BY m": "collect_list",
    "SELECT m, listagg(CAST(id AS STRING), ',') AS ids FROM numbers GROUP BY m": "listagg",
}
NO_CHANCE = (
    "SELECT * FROM numbers WHERE pmod(xxhash64(id), 10) = 0",
    "SELECT * FROM numbers ORDER BY id LIMIT 5 OFFSET 2",
    "SELECT * FROM (SELECT id + 1 AS id FROM (SELECT * FROM numbers ORDER BY id)) LIMIT 5",
    "SELECT m, sort_array(collect_list(id)) AS ids, max(id) AS last FROM numbers GROUP BY m",
    "SELECT m, size(collect_set(id)) AS many FROM numbers GROUP BY m",
    "SELECT id, first_value(id) OVER (PARTITION BY m ORDER BY id) AS x FROM numbers",
    "SELECT DISTINCT m FROM numbers",
)


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    """The numbers below 300, as a view too."""
    found = spark.range(300).selectExpr("id", "id % 3 AS m")
    found.createOrReplaceTempView("numbers")
    return found


@pytest.mark.usefixtures("numbers")
def test_chance_in_a_query_is_named_and_what_is_none_passes(spark: SparkSession, tmp_path: Path) -> None:
    found = {query: chance_in(spark.sql(query)) or "" for query in (*CHANCE, *NO_CHANCE)}
    assert {query: word in found[query] for query, word in CHANCE.items()} == dict.fromkeys(CHANCE, True), found
    assert [found[query] for query in NO_CHANCE] == [""] * len(NO_CHANCE)
    for query in list(CHANCE)[:2]:
        config = TableConfig(output=str(tmp_path / "out"), query=query, id_columns=("id",), label="m")
        with pytest.raises(ConfigError, match="differ each time") as caught:
            tables.run(spark, config)
        assert "pmod(xxhash64(id), 10)" in caught.value.next_step


def test_chance_in_a_data_frame_is_refused_until_its_rows_are_fixed(numbers: DataFrame, tmp_path: Path) -> None:
    some = numbers.sample(fraction=0.5, seed=1)
    for df in (some, numbers.randomSplit([0.5, 0.5])[0], numbers.limit(5), numbers.dropDuplicates(["m"])):
        with pytest.raises(ConfigError, match="differ each time"):
            lockstep.write_dataset(df, str(tmp_path / "out"), id_columns="id")
    fixed = some.localCheckpoint()
    manifest = lockstep.write_dataset(fixed, str(tmp_path / "out"), id_columns="id", split="1/1")
    assert manifest.counts.written == fixed.count()


def other_each_time(df: DataFrame, folder: Path, what: str) -> DataFrame:
    """The rows of `df`, whose column `what` grows by 1 with each execution; Spark takes them for the same each time."""
    folder.mkdir()

    def grown(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        turn = len(list(folder.iterdir()))
        (folder / str(turn)).touch()
        for frame in frames:
            frame[what] += turn
            yield frame

    return df.coalesce(1).mapInPandas(grown, df.schema)


@pytest.mark.parametrize("classes", [3, 2000 // 3])
def test_weights_of_other_rows_than_those_written_are_refused(
    spark: SparkSession, classes: int, tmp_path: Path
) -> None:
    rows = spark.range(2000).selectExpr("id", f"id * id % {classes} AS y")
    other = other_each_time(rows, tmp_path / "turns", "y")
    url = str(tmp_path / "out")
    with pytest.raises(DataError, match="other rows when it was read again") as caught:
        lockstep.write_dataset(other, url, id_columns="id", label="y", weights="balanced", fmt="parquet")
    assert re.fullmatch(r"\d+ records of class `\d+` first, \d+ afterwards", caught.value.got)
    assert not Path(url).exists()
    lockstep.write_dataset(rows, url, id_columns="id", label="y", weights="balanced", fmt="parquet")
    written = ds.dataset(url, partitioning="hive").to_table(columns=["y", "weight", "split"]).to_pandas()
    train = written[written["split"] == "train"]
    counts = Counter(train["y"])
    wanted = [len(train) / (len(counts) * counts[y]) for y in train["y"]]
    assert train["weight"].to_numpy() == pytest.approx(wanted, rel=1e-6)


def test_rows_computed_again_between_counting_and_writing_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, plan_shards = str(tmp_path / "out"), shards.plan_shards

    def after_a_loss(*args: object) -> object:
        spark.catalog.clearCache()  # as if executors, with the rows that they held, were lost
        return plan_shards(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("lockstep.etl.write.dataset.plan_shards", after_a_loss)
    other = other_each_time(spark.range(500).selectExpr("id", "id % 3 AS y"), tmp_path / "turns", "id")
    with pytest.raises(DataError, match="other rows when it was read again") as caught:
        lockstep.write_dataset(other, url, id_columns="id", label="y")
    assert "other sample ids in split" in caught.value.got
    same = spark.range(500).selectExpr("id", "id % 3 AS y")
    assert lockstep.write_dataset(same, url, id_columns="id", label="y").counts.written == 500
