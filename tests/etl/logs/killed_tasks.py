"""Two ETL jobs in one Java process: of a log of noise, and one whose tasks die.

Usage: python killed_tasks.py LOG OUTPUT SHARD_BYTES NOISE, the rooms on PYTHONPATH. The first job is refused as a user
sees it; the line `noise ended with CODE` on stderr separates it from the second. There the first attempt of a reading
and of a writing task kills its own process. The classes live in __main__, so that Spark ships them by value.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from unittest import mock

import pyarrow as pa

from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import ParseLog
from lockstep.etl.spark.tasks import Items
from lockstep.etl.write.shards import WriteShards
from lockstep.jobs import etl_logs
from lockstep.jobs._cli import run_job
from lockstep.spark.session import spark_session


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
    log, output, shard_bytes, noise = sys.argv[1:]
    try:
        run_job(etl_logs.main, ["--input", noise, "--output", "out", "--master", "local[1]"])
    except SystemExit as ended:
        print(f"noise ended with {ended.code}", file=sys.stderr, flush=True)
    config = LogsConfig(
        inputs=(log,),
        output=output,
        split="group:visitor:80/20",
        shard_bytes=int(shard_bytes),
        split_bytes=-(-os.path.getsize(log) // 3),
    )
    with (
        mock.patch("lockstep.etl.logs.job.ParseLog", DyingParse),
        mock.patch("lockstep.etl.write.dataset.WriteShards", DyingWrite),
        spark_session("killed tasks", "local[2,3]") as spark,
    ):
        job.run(spark, config)
