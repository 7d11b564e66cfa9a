"""Work for tasks that comes as rows: a plan of small rows in, batches of what each comes to out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl.spark_errors import in_task
from storage.settings import set_hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_TASKS = 10_000


Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class _Renamed:
    """A function for mapInArrow whose batches come with other names than its own `names`."""

    function: Callable[[Batches], Iterator[pa.RecordBatch]]
    names: tuple[str, ...]

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        return self.function(batch.rename_columns(list(self.names)) for batch in batches)


def mapped(df: DataFrame, function: Callable[[Batches], Iterator[pa.RecordBatch]], ddl: str) -> DataFrame:
    """df.mapInArrow, which itself asks for columns by names that it does not quote: here they may hold dots and
    backticks.
    """
    names = tuple(df.columns)
    if not any(set(name) & set(".`") for name in names):
        return df.mapInArrow(function, ddl)
    return df.toDF(*(f"_{number}" for number in range(len(names)))).mapInArrow(_Renamed(function, names), ddl)


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
