"""Work for tasks that comes as rows: a plan of small rows in, batches of what each comes to out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etl.spark_errors import in_task
from storage.errors import DataError
from storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_TASKS = 10_000


Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class _Declared:
    """A function for mapInArrow whose batches come under its own `names` and with 32-bit offsets."""

    function: Callable[[Batches], Iterator[pa.RecordBatch]]
    names: tuple[str, ...]

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        return self.function(narrowed(batch.rename_columns(list(self.names))) for batch in batches)


def mapped(df: DataFrame, function: Callable[[Batches], Iterator[pa.RecordBatch]], ddl: str) -> DataFrame:
    """df.mapInArrow, whatever the session's settings and the columns' names: Spark resolves names without quoting them,
    so that dots and backticks would fail, and sends `narrowed` types under another setting as large ones.
    """
    names = tuple(df.columns)
    if any(set(name) & set(".`") for name in names):
        df = df.toDF(*(f"_{number}" for number in range(len(names))))
    return df.mapInArrow(_Declared(function, names), ddl)


def narrowed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with strings and bytes of 32-bit offsets, in lists too; Spark sends 64-bit ones where
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
        "rows that Spark hands over together are too large",
        got=f"{size_bytes} bytes in {rows} rows",
        allowed="less than 2 GiB",
        next_step="Lower spark.sql.execution.arrow.maxRecordsPerBatch, or store smaller values.",
    )


def _narrow(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_narrow(kind.value_type)))
    if kind in (pa.large_string(), pa.string_view()):
        return pa.string()
    return pa.binary() if kind in (pa.large_binary(), pa.binary_view()) else kind


class EachRow(ABC):
    """The function for mapInArrow: a subclass says what becomes of one row of the plan."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._settings = settings

    @in_task
    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        """What `batches_of` gives for each row in turn, with the session's Hadoop settings in force."""
        set_hadoop_settings(self._settings)
        for batch in batches:
            for row in batch.to_pylist():
                yield from self.batches_of(row)

    @abstractmethod
    def batches_of(self, row: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """The batches of one row of the plan."""


def planned(spark: SparkSession, rows: Sequence[tuple[object, ...]], ddl: str) -> DataFrame:
    """The plan as a data frame of `ddl`, a task for each row (up to MAX_TASKS)."""
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, min(len(rows), MAX_TASKS)), ddl)


def by_partition(df: DataFrame, count: int, number: Column) -> DataFrame:
    """`df` in `count` partitions, each row in the one that `number` (int) names.

    That is repartitionById, which Spark has from 4.1 on; before, rows go by numbers whose hash Spark sends there.
    """
    if hasattr(df, "repartitionById"):
        return df.repartitionById(count, number)
    return by_hash(df, count, number)


def by_hash(df: DataFrame, count: int, number: Column) -> DataFrame:
    """by_partition where Spark only partitions by a hash of a value."""
    from pyspark.sql import functions as f

    values = f.expr(f"array({', '.join(map(str, _values_by_remainder(count)))})")
    return df.repartition(count, f.element_at(values, number + 1))


def _values_by_remainder(count: int) -> list[int]:
    """For each remainder 0..count-1 the least number whose Spark hash has it, as HashPartitioning takes it."""
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
