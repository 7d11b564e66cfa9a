"""What a task gets, and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.etl.spark.tasks import (
    MIN_ROWS,
    OPEN_BYTES,
    by_hash,
    by_partition,
    joined,
    slices,
    spark_hash,
    values_by_remainder,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIB = 1 << 20


@given(st.lists(st.integers(0, 200 * MIB), min_size=1, max_size=60), st.integers(1, 64 * MIB), st.integers(1, 40))
def test_slices_are_all_items_in_order_and_no_more_than_are_worth_it(sizes: list[int], step: int, cores: int) -> None:
    found = slices(sizes, step, cores)
    assert [at for run in found for at in run] == list(range(len(sizes))) and all(found)
    costs = [size + OPEN_BYTES for size in sizes]
    assert len(found) <= max(-(-sum(costs) // (step + OPEN_BYTES)), cores)
    target = sum(costs) / min(len(sizes), max(-(-sum(costs) // (step + OPEN_BYTES)), cores))
    assert all(sum(costs[at] for at in run[:-1]) <= target * 1.001 for run in found), "only its last item goes beyond"


def test_ranges_of_a_large_file_keep_a_task_each_and_small_files_share_one() -> None:
    assert len(slices([64 * MIB] * 10 + [5], 64 * MIB, 2)) == 11
    assert len(slices([3000] * 2000, 64 * MIB, 2)) == 3
    assert len(slices([3000] * 2000, 64 * MIB, 16)) == 16
    assert len(slices([3000] * 3, 64 * MIB, 16)) == 3
    assert len(slices([1] * 10_000_000, 1, 2)) == 10_000


def test_small_batches_are_joined_in_order() -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string())])
    batches = [
        pa.record_batch([pa.array([n] * (n % 7)), pa.array([str(n)] * (n % 7))], schema=schema) for n in range(2000)
    ]
    found = list(joined(iter(batches)))
    assert pa.Table.from_batches(found) == pa.Table.from_batches(batches, schema)
    assert all(batch.num_rows >= MIN_ROWS for batch in found[:-1]) and len(found) < 7
    assert list(joined(iter([]))) == []


@pytest.mark.slow
def test_rows_go_where_a_number_says_by_a_hash_too(spark: SparkSession) -> None:
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
