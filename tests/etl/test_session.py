"""Settings of a session that a job changes for its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from etl.session import BATCHES, bounded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
def test_batches_are_small_inside_and_as_before_behind(spark: SparkSession) -> None:
    kept, changed = BATCHES
    spark.conf.unset(kept)
    before = {kept: spark.conf.get(kept), changed: "777"}
    spark.conf.set(changed, "777")
    try:
        with pytest.raises(RuntimeError, match="a task"), bounded(spark):
            assert {key: spark.conf.get(key) for key in BATCHES} == BATCHES
            raise RuntimeError("a task")
        assert {key: spark.conf.get(key) for key in BATCHES} == before
    finally:
        spark.conf.unset(changed)
