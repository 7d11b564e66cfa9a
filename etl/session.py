"""Settings of a shared Spark session that fit one job, put back behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from etl.ranges import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITION_BYTES = 32 << 20
PACKED_GROWTH = 10  # logs shrink by about this much
# A batch is a unit of memory in a Python task and, where rows are cached, in Java, whose serializer holds on to several
# of them at once. Spark's 10,000 rows of some KiB each are too many (docs/decisions/060-codec-kernels.md).
BATCHES = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.inMemoryColumnarStorage.batchSize": "128",
}


@contextmanager
def tuned(spark: SparkSession, sources: Sequence[Source]) -> Iterator[None]:
    """As many shuffle partitions as the input asks for, so that a small job is not 200 tasks a shuffle; `bounded`."""
    size = sum(source.size_bytes * (PACKED_GROWTH if source.codec != "none" else 1) for source in sources)
    cores = spark.sparkContext.defaultParallelism
    partitions = max(cores, -(-size // PARTITION_BYTES))
    with _set(spark, {"spark.sql.shuffle.partitions": str(partitions)}), bounded(spark):
        yield


@contextmanager
def bounded(spark: SparkSession) -> Iterator[None]:
    """Batches of Arrow and of Spark's cache so small that a task's memory does not grow with its rows' bytes."""
    with _set(spark, BATCHES):
        yield


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            spark.conf.set(key, old) if old is not None else spark.conf.unset(key)
