"""An ETL job that loses an executor and its shuffle files, or its driver.

Usage: python lost_parts.py MASTER LOG OUTPUT SHARD_BYTES MARKS [driver], the rooms on PYTHONPATH; SPARK_LOCAL_DIRS and
TMPDIR are one folder. The first writing task that ends kills the executor under it; the next one, once, deletes every
shuffle file that is there and fails. With `driver`, the first kills the driver's Python instead. MARKS is a folder for
what was done. The class lives in __main__, so that Spark ships it by value.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import psutil
import pyarrow as pa

from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.write.shards import WriteShards
from lockstep.spark.session import spark_session

MASTER, LOG, OUTPUT, SHARD_BYTES, MARKS, *WHAT = sys.argv[1:]


def first(what: str) -> bool:
    """Whether nobody has called this for `what` before: attempts of stages count anew, files stay."""
    try:
        os.close(os.open(os.path.join(MARKS, what), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def java() -> psutil.Process:
    """The Java process above this task: above it are pyspark's workers and their daemon."""
    return next(one for one in psutil.Process().parents() if "java" in one.name())


class Losing(WriteShards):
    def write(self, partition: int, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        result = WriteShards.write(self, partition, batches)
        if WHAT:
            os.kill(java().ppid(), signal.SIGKILL)
            signal.pause()
        if first("executor"):
            java().kill()
            signal.pause()
        found = list(Path(tempfile.gettempdir()).rglob("shuffle_*"))
        if found and first("shuffle"):
            for path in found:
                path.unlink(missing_ok=True)
            raise OSError("its shuffle files are gone")
        return result


if __name__ == "__main__":
    config = LogsConfig(inputs=(LOG,), output=OUTPUT, split="group:visitor:80/20", shard_bytes=int(SHARD_BYTES))
    with mock.patch("lockstep.etl.write.dataset.WriteShards", Losing), spark_session("lost parts", MASTER) as spark:
        job.run(spark, config)
