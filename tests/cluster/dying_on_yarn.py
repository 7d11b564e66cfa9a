"""One session on YARN that makes a dataset of a log twice: by one executor, then by two while much around them dies.

Usage: spark-submit --master yarn dying_on_yarn.py LOG OUTPUT FOLDER, with one executor to begin with and the rooms on
PYTHONPATH. In the second job a reading task is killed, an executor is killed behind its write, and a reading task waits
for FOLDER/datanode-died after it has made FOLDER/reading: the time for a DataNode to die. The classes live in __main__,
so that Spark ships them by value.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pyarrow as pa

from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.logs.parse import ParseLog
from lockstep.etl.write.shards import WriteShards
from lockstep.spark.session import hadoop_settings_of, spark_session
from lockstep.storage.settings import set_hadoop_settings

LOG, OUTPUT, FOLDER = sys.argv[1:]
WAIT_S = 900.0


def first(what: str) -> bool:
    """Whether nobody has called this for `what` before: attempts of stages count anew, files stay."""
    try:
        os.close(os.open(os.path.join(FOLDER, what), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


class DyingParse(ParseLog):
    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        if partition() == 0 and first("reading"):
            end = time.monotonic() + WAIT_S
            while not os.path.exists(os.path.join(FOLDER, "datanode-died")):
                assert time.monotonic() < end, "no DataNode has died"
                time.sleep(0.05)
        for batch in ParseLog.__call__(self, items):
            yield batch
            if partition() == 1 and first("killed-worker"):
                os.kill(os.getpid(), signal.SIGKILL)


class DyingWrite(WriteShards):
    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        result = WriteShards.write(self, partition, batches)
        if partition == 1 and first("killed-executor"):
            os.kill(parent_of(os.getppid()), signal.SIGKILL)  # above this worker is pyspark's daemon, above it Java
        return result


def config(name: str, ranges: int) -> LogsConfig:
    split_bytes = -(-int(os.environ["LOG_BYTES"]) // ranges)
    return LogsConfig(
        inputs=(LOG,),
        output=f"{OUTPUT}/{name}",
        split="group:visitor:80/20",
        shard_bytes=300_000,
        split_bytes=split_bytes,
    )


def wait_for_executors(spark: Any, wanted: int) -> None:
    context = spark.sparkContext._jsc.sc()
    end = time.monotonic() + WAIT_S
    while context.getExecutorMemoryStatus().size() < wanted + 1:  # the driver is counted too
        assert time.monotonic() < end, f"no {wanted} executors"
        time.sleep(0.1)


if __name__ == "__main__":
    with spark_session("dying on YARN") as spark:
        set_hadoop_settings(hadoop_settings_of(spark))
        wait_for_executors(spark, 1)
        job.run(spark, config("one", 2))
        assert spark.sparkContext._jsc.sc().requestExecutors(2)  # two in all: the first one was not asked for this way
        wait_for_executors(spark, 2)
        with (
            mock.patch("lockstep.etl.logs.job.ParseLog", DyingParse),
            mock.patch("lockstep.etl.write.dataset.WriteShards", DyingWrite),
        ):
            job.run(spark, config("two", 5))
