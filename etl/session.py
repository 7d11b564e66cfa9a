"""Settings of a shared Spark session that fit one job, put back behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from etl.ranges import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITION_BYTES = 32 << 20
PACKED_GROWTH = 10  # logs shrink by about this much


@contextmanager
def tuned(spark: SparkSession, sources: Sequence[Source]) -> Iterator[None]:
    """As many shuffle partitions as the input asks for, so that a small job is not 200 tasks a shuffle."""
    size = sum(source.size_bytes * (PACKED_GROWTH if source.codec != "none" else 1) for source in sources)
    cores = spark.sparkContext.defaultParallelism
    settings = {
        "spark.sql.shuffle.partitions": str(max(cores, -(-size // PARTITION_BYTES))),
        # A batch is a unit of memory in a Python task; records of some KiB each make 10,000 too many.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    }
    before = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            spark.conf.set(key, old) if old is not None else spark.conf.unset(key)
