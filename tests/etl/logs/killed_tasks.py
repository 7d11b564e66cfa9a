"""Run one ETL job whose tasks die: the first attempt of a reading and of a writing task kills its own process.

Usage: python killed_tasks.py LOG OUTPUT SHARD_BYTES, the rooms on PYTHONPATH. The classes live in
__main__, so that Spark ships them by value.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from unittest import mock

import pyarrow as pa

from etl.logs import job
from etl.logs.parse import ParseLog
from etl.spark.tasks import Items
from etl.write.config import LogsConfig
from etl.write.shards import WriteShards
from jobs._session import spark_session


def first_attempt() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber() == 0 and context.partitionId() == 1


class DyingParse(ParseLog):
    def __call__(self, items: Items) -> Iterator[pa.RecordBatch]:
        for rows in ParseLog.__call__(self, items):
            yield rows
            if first_attempt():
                os.kill(os.getpid(), signal.SIGKILL)


class DyingWrite(WriteShards):
    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        result = WriteShards.write(self, partition, batches)
        if first_attempt():
            os.kill(os.getpid(), signal.SIGKILL)  # behind the upload: an attempt's file stays that nobody asked for
        return result


if __name__ == "__main__":
    log, output, shard_bytes = sys.argv[1:]
    config = LogsConfig(
        inputs=(log,),
        output=output,
        split="group:visitor:80/20",
        shard_bytes=int(shard_bytes),
        split_bytes=-(-os.path.getsize(log) // 3),
    )
    with (
        mock.patch("etl.logs.job.ParseLog", DyingParse),
        mock.patch("etl.write.dataset.WriteShards", DyingWrite),
        spark_session("killed tasks", "local[2,3]") as spark,
    ):
        job.run(spark, config)
