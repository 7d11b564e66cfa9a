"""What a small table costs: few Spark jobs of few tasks, and the bytes of the way that large ones take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from lockstep.etl.write import dataset
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.declare import load_schema
from tests.etl.conftest import tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

SCHEMA = load_schema("""
fields = [
    {name = "visit", dtype = "int64", encoding = {kind = "ignore"}},
    {name = "hour", dtype = "int64", encoding = {kind = "standardise"}},
    {name = "price", dtype = "float64", encoding = {kind = "standardise"}},
    {name = "city", dtype = "string", encoding = {kind = "vocabulary", max_size = 20}},
    {name = "tags", dtype = "string", list = true, encoding = {kind = "vocabulary", min_count = 2}},
    {name = "bought", dtype = "bool", kind = "label"},
]
""")
STEPS = {
    "make ids, splits and records": 3,  # two partitions of the frame, and their sums
    "check for leakage between splits": 1,
    "count vocabularies": 1,
    "add up means and variances": 1,
    "order the records and write the shards": 3,  # one reads what is cached, and one a shard
}
"""The Spark jobs of a small table that Spark holds in two partitions, and the tasks of each. Each query costs Spark a
tenth of a second of planning, whatever its size, so that one more of them is worth a reason.
"""


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """900 rows in two partitions."""
    return spark.range(0, 900, 1, 2).selectExpr(
        "id AS visit", "id % 24 AS hour", "CAST(id % 7 AS DOUBLE) / 3 AS price", "concat('c', id * id % 31) AS city",
        "array(concat('t', id % 5), concat('t', id)) AS tags", "id % 3 = 0 AS bought",
    )  # fmt: skip


def write(df: DataFrame, url: Path) -> None:
    write_dataset(df, url, id_columns="visit", schema=SCHEMA, fmt="parquet")


def newest_job(spark: SparkSession) -> int:
    """The number of Spark's newest job; -1 before the first. Its page forgets old ones, so they cannot be counted."""
    assert spark.sparkContext._jsc is not None
    found = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    return int(found.apply(0).jobId()) if found.size() else -1


def tasks_after(spark: SparkSession, newest: int) -> dict[str, list[int]]:
    """The tasks of each Spark job after number `newest`, by what it does."""
    assert spark.sparkContext._jsc is not None
    found, tasks = spark.sparkContext._jsc.sc().statusStore().jobsList(None), dict[str, list[int]]()
    for job in (found.apply(place) for place in range(found.size())):  # the newest first
        if job.jobId() <= newest:
            break
        what = str(job.description().get()) if job.description().isDefined() else str(job.name())
        tasks.setdefault(what.removeprefix("Lockstep: "), []).append(int(job.numTasks()))
    return tasks


def test_a_small_table_is_one_small_job_a_step(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {key: spark.conf.get(key) for key in ("spark.sql.adaptive.enabled", "spark.sql.shuffle.partitions")}
    newest = newest_job(spark)
    write(frame, tmp_path / "small")
    assert tasks_after(spark, newest) == {what: [tasks] for what, tasks in STEPS.items()}
    assert {key: spark.conf.get(key) for key in settings} == settings
    rows = frame.toPandas()
    train = rows[rows["visit"].isin(read(tmp_path / "small")["visit"])]
    fitted = {path.stem: json.loads(path.read_bytes()) for path in (tmp_path / "small" / "_fitted").iterdir()}
    cities = sorted(train["city"].value_counts().items(), key=lambda item: (-item[1], item[0]))[:20]
    assert list(zip(fitted["city"]["tokens"], fitted["city"]["counts"], strict=True)) == cities
    tags = train["tags"].explode().value_counts()
    assert set(fitted["tags"]["tokens"]) == set(tags[tags > 1].index)
    for name in ("hour", "price"):
        assert fitted[name]["mean"] == pytest.approx(train[name].mean(), rel=1e-12)
        assert fitted[name]["variance"] == pytest.approx(train[name].var(ddof=0), rel=1e-12)
    # Where rows are many, they are shuffled to be counted.
    monkeypatch.setattr(dataset, "SMALL_BYTES", -1)
    write(frame, tmp_path / "large")
    assert tree(tmp_path / "large") == tree(tmp_path / "small")


def read(url: Path) -> pd.DataFrame:
    """The rows of train."""
    return pd.read_parquet(url / "split=train")
