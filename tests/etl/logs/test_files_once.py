"""Whole jobs: ids that name a file's path, one file given twice, and both between an append and its chain."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.spark.errors import SameIdError
from lockstep.features.sample_id import sample_id
from lockstep.jobs._etl import BY_PLACE, summary
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, DataError
from tests.etl.conftest import nasa_lines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = """
[[fields]]
name = "order"
dtype = "string"
encoding = { kind = "ignore" }

[[fields]]
name = "paid"
dtype = "bool"
kind = "label"
"""


def day(folder: Path, name: str, rows: int = 60) -> None:
    (folder / name).mkdir(parents=True)
    lines = [f"{name}-{number},{'yes' if number % 3 else 'no'}\n" for number in range(rows)]
    (folder / name / "orders.csv").write_text("order,paid\n" + "".join(lines))


def config(folder: Path, out: str, *inputs: str, **more: Any) -> LogsConfig:
    (folder / "schema.toml").write_text(SCHEMA)
    return LogsConfig(
        log_format="csv",
        schema=str(folder / "schema.toml"),
        inputs=tuple(str(folder / name) for name in inputs),
        output=str(folder / out),
        fmt="parquet",
        **more,
    )


def rows_of(*datasets: Path) -> dict[str, tuple[str, int]]:
    """The split and the id of each order."""
    return {
        row["order"]: (path.parent.name, row["sample_id"])
        for dataset in datasets
        for path in dataset.glob("split=*/*.parquet")
        for row in pq.read_table(path, partitioning=None).to_pylist()
    }


def test_a_day_that_comes_moves_no_record_of_the_others(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("a", "b"):
        day(tmp_path / "days", name)
    first = logs.run(spark, config(tmp_path, "A", "days"))
    before = rows_of(tmp_path / "A")
    assert BY_PLACE in summary(first, "A") and "file and position" in BY_PLACE
    assert before["a-0"][1] == sample_id([b"a/orders.csv", str(len("order,paid\n")).encode()], 0)
    day(tmp_path / "days", "0")
    # as a new dataset of all days, and as an append of the new one: the same ids and splits
    logs.run(spark, config(tmp_path, "B", "days"))
    after = rows_of(tmp_path / "B")
    assert len(after) == 180 and {order: after[order] for order in before} == before
    root = {"input_root": str(tmp_path / "days")}
    logs.run(spark, config(tmp_path, "A-next", "days/0", append_to=str(tmp_path / "A"), **root))
    assert rows_of(tmp_path / "A", tmp_path / "A-next") == after
    appended(tmp_path)


def appended(folder: Path) -> None:
    """Appends that are refused before Spark starts."""
    chain = {"append_to": str(folder / "A-next"), "input_root": str(folder / "days")}
    with pytest.raises(ConfigError, match=r"is in .*/A already") as caught:
        logs.check(config(folder, "C", "days/a", **chain))
    assert "days/a/orders.csv" in str(caught.value) and "Remove" in caught.value.next_step
    shutil.copytree(folder / "days" / "a", folder / "elsewhere" / "0")
    with pytest.raises(ConfigError, match=r"ids that .*/A-next has") as caught:
        logs.check(config(folder, "C", "elsewhere", append_to=str(folder / "A-next")))
    for word in ("elsewhere/0/orders.csv", "days/0/orders.csv", "other bytes", "--input-root", "--id-columns"):
        assert word in str(caught.value)


def log_job(folder: Path, out: str, *inputs: str, **more: Any) -> LogsConfig:
    places = tuple(str(folder / name) for name in inputs)
    return LogsConfig(log_format="common", inputs=places, output=str(folder / out), split="1/1", **more)


def test_a_rotated_log_and_its_packed_copy_are_not_counted_twice(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    text = nasa_lines(3000)
    (tmp_path / "logs" / "access.log.1").write_bytes(text)
    (tmp_path / "logs" / "access.log.2.gz").write_bytes(gzip.compress(text))
    with pytest.raises(DataError, match="same content") as caught:
        logs.run(spark, log_job(tmp_path, "out", "logs"))
    for name in ("access.log.1 ", "access.log.2.gz "):
        assert name in caught.value.what + " "
    assert not (tmp_path / "out").exists()
    (tmp_path / "first").mkdir()
    shutil.move(tmp_path / "logs" / "access.log.1", tmp_path / "first" / "access.log")
    label = {"label": "page LIKE '%html'"}
    logs.run(spark, log_job(tmp_path, "out", "first", **label))
    with pytest.raises(DataError, match=r"same content as .*first/access.log, which is in .*out already"):
        logs.run(spark, log_job(tmp_path, "next", "logs", append_to=str(tmp_path / "out"), **label))
    found: DatasetManifest = load_dataset(str(tmp_path / "out"))
    assert BY_PLACE not in summary(found, "out") and found.source[0].path is None


@pytest.mark.parametrize("split", ["80/20", "group:paid:1/1"])
def test_equal_ids_of_a_job_are_refused_with_both_places(spark: SparkSession, tmp_path: Path, split: str) -> None:
    day(tmp_path, "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "orders.csv").write_text("order,paid\nb-0,no\na-7,no\n")  # a-7 is paid in the other file
    told = config(tmp_path, "out", "a", "b", id_columns=("order",), split=split)
    with pytest.raises(SameIdError) as caught:
        logs.run(spark, told)
    assert "Name more id columns" in str(caught.value)
    if split == "80/20":
        first = (tmp_path / "a" / "orders.csv").read_bytes().index(b"a-7,")
        for word in (f"a/orders.csv at {first}", "b/orders.csv at 18"):
            assert word in str(caught.value)
    assert not (tmp_path / "out").exists()
