"""Work for Spark tasks: items in slices, functions over Arrow batches, rows by partition, files that tasks write."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.etl.columns import ddl_of
from lockstep.etl.spark.errors import in_task
from lockstep.storage.errors import DataError, StorageError
from lockstep.storage.files.interface import Writer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_stream
from lockstep.storage.settings import set_hadoop_settings, settings_for_tasks
from lockstep.storage.urls import join, parent

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_TASKS = 10_000
OPEN_BYTES = 64 << 10
MIN_ROWS, MIN_BYTES = 1024, 4 << 20
Batches = Iterable[pa.RecordBatch]
COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class _Mapped:
    """A function for mapInArrow whose batches have its own column `names` and 32-bit offsets, under the session's
    Hadoop settings.
    """

    function: Callable[[Batches], Iterator[pa.RecordBatch]]
    names: tuple[str, ...]
    settings: dict[str, str]

    @in_task
    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        set_hadoop_settings(self.settings)
        yield from self.function(narrowed(batch.rename_columns(list(self.names))) for batch in batches)


def mapped(df: DataFrame, function: Callable[[Batches], Iterator[pa.RecordBatch]], output: pa.Schema) -> DataFrame:
    """Call df.mapInArrow with any column names and session settings; `output` are the columns of `function`'s batches.

    Spark resolves column names without quoting them, so names with dots and backticks would fail, and with
    spark.sql.execution.arrow.useLargeVarTypes it sends the `narrowed` types as large ones.
    """
    names = tuple(df.columns)
    if any(set(name) & set(".`") for name in names):
        df = df.toDF(*(f"_{number}" for number in range(len(names))))
    return df.mapInArrow(_Mapped(function, names, settings_for_tasks()), ddl_of(output))


def narrowed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with 32-bit offsets for strings and bytes, in lists too; Spark sends 64-bit ones if
    spark.sql.execution.arrow.useLargeVarTypes is set. Offsets are converted, values are not copied.

    Raises DataError for a column of 2 GiB or more.
    """
    schema = pa.schema([field.with_type(_narrow(field.type)) for field in batch.schema])
    if schema.equals(batch.schema):
        return batch
    try:
        return batch.cast(schema)
    except pa.ArrowInvalid:
        raise rows_too_large(batch.nbytes, batch.num_rows) from None


def rows_too_large(size_bytes: int, rows: int) -> DataError:
    """The error for a batch that 32-bit offsets cannot hold."""
    return DataError(
        "a batch of rows from Spark is too large",
        got=f"{size_bytes} bytes in {rows} rows",
        allowed="less than 2 GiB",
        next_step="Lower spark.sql.execution.arrow.maxRecordsPerBatch, or store smaller values.",
    )


def _narrow(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_narrow(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_narrow(field.type)) for field in kind])
    if kind in (pa.large_string(), pa.string_view()):
        return pa.string()
    return pa.binary() if kind in (pa.large_binary(), pa.binary_view()) else kind


Items = Sequence[Mapping[str, Any]]


def over_slices(
    spark: SparkSession,
    items: Items,
    sizes: Sequence[int],
    slice_bytes: int,
    function: Callable[[Items], Iterator[pa.RecordBatch]],
    output: pa.Schema,
) -> DataFrame:
    """The rows that `function` makes of `items`, which are plain values: each task gets neighbouring items, as `slices`
    cuts them by their `sizes` in bytes. `output` are the columns of its batches.
    """
    each = _EachSlice(function, settings_for_tasks())
    return _sliced(spark, items, sizes, slice_bytes).mapInArrow(each, ddl_of(output))


@dataclass(frozen=True)
class _EachSlice:
    """The function for mapInArrow over `_sliced` rows, under the session's Hadoop settings."""

    function: Callable[[Items], Iterator[pa.RecordBatch]]
    settings: dict[str, str]

    @in_task
    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        set_hadoop_settings(self.settings)
        for batch in batches:
            for text in batch.column(0).to_pylist():
                yield from joined(self.function(json.loads(text)))


def joined(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of MIN_ROWS or MIN_BYTES at least, except the last: each batch costs Spark about a
    millisecond, and a small file makes two.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= MIN_ROWS or size >= MIN_BYTES:
            yield from _one(held)
            held, rows, size = [], 0, 0
    yield from _one(held)


def _one(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if len(batches) < 2:
        yield from batches
    else:
        yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


def _sliced(spark: SparkSession, items: Items, sizes: Sequence[int], slice_bytes: int) -> DataFrame:
    """A data frame of one column and a row for each task: its items as JSON.

    Made in Java: a data frame of Python rows would pass through an additional Python task.
    """
    from pyspark.sql import DataFrame

    cores = spark.sparkContext.defaultParallelism
    texts = [json.dumps(items[run.start : run.stop]) for run in slices(sizes, slice_bytes, cores)]
    java = spark.sparkContext._jsc.parallelize(texts, len(texts)).rdd()
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    strings = spark._jsparkSession.createDataset(java, jvm.org.apache.spark.sql.Encoders.STRING())
    return DataFrame(strings.toDF(), spark)


def slices(sizes: Sequence[int], slice_bytes: int, cores: int) -> list[range]:
    """The items of each task, in order: neighbours of `slice_bytes` together, or one item that is as large. If that
    makes fewer tasks than cores, as many tasks as cores. Opening a file counts like reading OPEN_BYTES.
    """
    costs = np.asarray(sizes, dtype=np.float64) + OPEN_BYTES
    total = costs.sum()
    count = min(max(math.ceil(total / (slice_bytes + OPEN_BYTES)), cores), len(sizes), MAX_TASKS)
    place = ((np.cumsum(costs) - costs) * count / total).astype(np.int64)  # the task in which each item begins
    starts = [0, *(np.flatnonzero(np.diff(place)) + 1).tolist(), len(sizes)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def by_partition(df: DataFrame, count: int, number: Column) -> DataFrame:
    """Return `df` in `count` partitions, each row in the one that `number` (int) names.

    Uses repartitionById, which Spark has from 4.1 on; for earlier versions see by_hash.
    """
    if hasattr(df, "repartitionById"):
        return df.repartitionById(count, number)
    return by_hash(df, count, number)


def by_hash(df: DataFrame, count: int, number: Column) -> DataFrame:
    """Do what by_partition does where Spark only partitions by hash: numbers become values of that hash."""
    from pyspark.sql import functions as f

    values = f.expr(f"array({', '.join(map(str, values_by_remainder(count)))})")
    return df.repartition(count, f.element_at(values, number + 1))


def values_by_remainder(count: int) -> list[int]:
    """Find, for each partition 0..count-1, the least number that Spark's HashPartitioning sends there."""
    found = np.full(count, -1)
    start, step = 0, 8 * count
    while (found < 0).any():
        values = np.arange(start, start + step, dtype=np.uint32)
        remainders, first = np.unique(spark_hash(values).astype(np.int64) % count, return_index=True)
        new = found[remainders] < 0
        found[remainders[new]] = values[first[new]]
        start += step
    return [int(value) for value in found]


def spark_hash(values: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Spark SQL's hash() of each int, (n,) uint32 -> (n,) int32: 32-bit MurmurHash3 (Appleby 2011) with seed 42."""
    with np.errstate(over="ignore"):
        mixed = _rotated(values * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        value = _rotated(mixed ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
        value ^= np.uint32(4)
        value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (value ^ (value >> np.uint32(16))).view(np.int32)


def _rotated(values: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (values << np.uint32(bits)) | (values >> np.uint32(32 - bits))


def partition_of_task() -> int:
    """The number of this task's partition."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def upload(folder: str, name: str, file: IO[bytes]) -> str:
    """Copy a local file into the attempts' folder under a name that no other attempt uses; returns its URL."""

    def produce(writer: Writer) -> None:
        file.seek(0)
        while data := file.read(COPY_BYTES):
            writer.write(data)

    fs, url = filesystem(folder), join(folder, f"{name}-{secrets.token_hex(8)}")
    # A task that outlives its job must not recreate a removed staging folder; an object store has no empty ones.
    if not fs.exists(folder if fs.promises.directories else parent(folder)):
        raise StorageError(
            f"{folder} is gone",
            got="no folder",
            allowed="the folder that the driver made",
            next_step="Run the job again.",
        )
    write_stream(fs, url, produce)
    return url
