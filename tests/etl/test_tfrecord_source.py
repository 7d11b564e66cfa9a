"""format("tfrecord") in a real session, which found the package by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.etl.index.tfrecord import index_directory
from lockstep.storage.errors import CorruptionError
from tests.pyspark_tfrecord.published import publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
def test_a_dataset_is_read_and_plain_files_are_written_and_read(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import AnalysisException

    rows = publish(tmp_path / "d", {"train": (30, 17), "test": (9,)})
    reading = spark.read.format("tfrecord")
    whole = reading.option("partitionBytes", "2000").load(str(tmp_path / "d"))
    found = [row.asDict() for row in whole.collect()]
    wanted = [{**row, "split": name} for name in ("test", "train") for row in rows[name]]
    for row in wanted:  # Spark's Row has a bytearray for binary
        row.update({name: bytearray(value) for name, value in row.items() if isinstance(value, bytes)})
    assert found == wanted  # each partition in its place, so in the order of the shards too
    with pytest.raises(AnalysisException, match="no column `pag`"):
        spark.read.format("tfrecord").option("columns", "pag").load(str(tmp_path / "d"))

    out = tmp_path / "out"
    spark.createDataFrame([(1,)], "a int")  # active again, if a test forked this process, which ends its connection
    frame = spark.range(10).selectExpr("id", "if(id % 3 = 0, null, id) some", "array(id, id) words")
    frame.coalesce(1).write.format("tfrecord").mode("append").save(str(out))
    assert sorted(os.listdir(out)) == ["_SUCCESS", "part-00000.tfrecord"]
    back = spark.read.format("tfrecord").load(str(out))
    assert back.dtypes == [("id", "bigint"), ("some", "bigint"), ("words", "array<bigint>")]
    assert back.collect() == frame.collect()
    assert sorted(os.listdir(tmp_path)) == ["d", "out"]

    indexed = index_directory(str(out), pattern="*.tfrecord", sample_records=9, spark=spark, settings={})
    assert [(file.path, file.records) for file in indexed.files] == [("part-00000.tfrecord", 10)]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "x.tfrecord").write_bytes((out / "part-00000.tfrecord").read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=r"x\.tfrecord, record 9"):  # itself, though it was raised in a task
        index_directory(str(theirs), pattern="*.tfrecord", sample_records=9, spark=spark, settings={})
    assert os.listdir(theirs) == ["x.tfrecord"]
