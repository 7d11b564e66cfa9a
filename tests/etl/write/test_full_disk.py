"""An output on a full disk: a small tmpfs that the test fills."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lockstep
from lockstep.etl.spark.errors import translating_errors
from lockstep.storage.errors import DiskFullError
from lockstep.storage.verify import verify
from tests.small_disk import BALLAST, fill, small_disk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def test_a_dataset_for_a_full_tmpfs_is_one_error_that_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(5_000).selectExpr("id", "cast(id % 7 as float) as x", "id % 2 = 0 as click")
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        ballast = fill(disk, left_bytes=48 << 10)  # its folders can be made, and no shard written
        with pytest.raises(DiskFullError, match="the disk is full: cannot ") as raised:
            lockstep.write_dataset(frame, str(disk / "data"), label="click", id_columns=["id"])
        assert raised.value.got == "No space left on device"
        assert [path.name for path in disk.iterdir()] == [BALLAST]
        ballast.unlink()
        lockstep.write_dataset(frame, str(disk / "data"), label="click", id_columns=["id"])
        assert verify(str(disk / "data")) == []


def test_a_task_whose_scratch_disk_is_full_by_an_error_that_it_raises(spark: SparkSession) -> None:
    def spills(number: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/block-7")

    with (
        pytest.raises(DiskFullError, match="it failed while sorting rows") as raised,
        translating_errors(spark, "sorting rows"),
    ):
        spark.sparkContext.range(1).map(spills).collect()
    assert raised.value.got == "OSError: [Errno 28] No space left on device: '/scratch/block-7'"
