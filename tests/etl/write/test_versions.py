"""The oldest Spark writes the same bytes as today's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from etl.spark.tasks import by_hash, by_partition, spark_hash, values_by_remainder
from tests.etl.conftest import ROOT, tree
from tests.spark import oldest
from tests.spark.datasets import NAMES, datasets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "names", [pytest.param(("tfrecord",), id="one"), pytest.param(NAMES, id="all", marks=pytest.mark.soak)]
)
def test_the_oldest_spark_writes_the_same_datasets(spark: SparkSession, tmp_path: Path, names: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(oldest.packages()), str(ROOT)])}
    command = [sys.executable, "-m", "tests.spark.datasets", str(tmp_path / "oldest"), *names]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            found = datasets(spark, tmp_path / "newest", names)  # beside the child, on the other core
            told = json.loads(child.communicate(timeout=600)[0].splitlines()[-1])
        finally:
            child.kill()
    assert told["spark"] == oldest.VERSION != spark.version
    assert told["datasets"] == found
    for name in names:
        oldest_files, newest_files = (
            {path: data for path, data in tree(tmp_path / side / name).items() if path != "_manifest.json"}
            for side in ("oldest", "newest")
        )
        assert oldest_files == newest_files


def test_rows_go_where_a_number_says_by_a_hash_too(spark: SparkSession) -> None:
    import numpy as np
    from pyspark.sql import functions as f

    hashes = spark_hash(np.arange(1000, dtype=np.uint32)).tolist()
    assert [row["h"] for row in spark.range(1000).selectExpr("hash(cast(id as int)) AS h").collect()] == hashes
    assert sorted(hash % 1000 for hash in spark_hash(np.array(values_by_remainder(1000), np.uint32)).tolist()) == list(
        range(1000)
    )
    rows = spark.range(50).selectExpr("cast(id % 7 as int) AS n")
    for sent in (by_hash, by_partition):
        wrong = sent(rows, 7, f.col("n")).where(f.spark_partition_id() != f.col("n"))
        assert wrong.count() == 0
