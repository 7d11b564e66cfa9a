"""A pandas frame, or an Arrow table, as columns of the types that Spark and the schema know."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UINT64 = pa.decimal128(20, 0)  # Spark has no unsigned numbers of 64 bits


def is_frame(rows: Any) -> bool:
    """Whether `rows` are a pandas frame or an Arrow table."""
    module = type(rows).__module__.partition(".")[0]
    return isinstance(rows, pa.Table) or (module == "pandas" and type(rows).__name__ == "DataFrame")


def arrow_columns(frame: Any, used: Collection[str] | None = None) -> dict[str, pa.Array | None]:
    """The columns of a pandas frame, named indexes first, or of an Arrow table, as `plain` has them; None for values of
    several types. NaN, NaT and NA of pandas are null. `used` names those to convert; None: all.

    Raises ConfigError for two columns of one name.
    """
    if isinstance(frame, pa.Table):
        named = [(str(name), frame.column(name)) for name in frame.column_names]
    else:
        indexes = [name for name in frame.index.names if name is not None]
        whole = frame.reset_index() if indexes else frame
        named = [(str(name), whole.iloc[:, place]) for place, name in enumerate(whole.columns)]
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "the frame has columns of the same name",
            got=", ".join(twice),
            allowed="each name once",
            next_step="Rename or drop the others.",
        )
    return {name: _column(values) for name, values in named if used is None or name in used}


def _column(values: Any) -> pa.Array | None:
    try:
        array = values if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)
        return plain(array)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def plain(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column without dictionaries and large offsets, whole numbers as int64 (uint64 as they are)."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(array, pa.ChunkedArray):  # of an empty or a very large column
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.cast(_plain_type(array.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", _plain_type(kind.value_type)))
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_integer(kind):
        return kind if kind == pa.uint64() else pa.int64()
    return pa.float32() if kind == pa.float16() else kind


def spark_frame(frame: Any, used: Collection[str] | None = None) -> DataFrame:
    """The rows in the active Spark session, of the columns that are `used`; None: of all. Raises ConfigError without a
    session, and for columns of several types.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is None:
        raise ConfigError(
            "a pandas frame needs a Spark session to be written",
            got="no session in this thread",
            allowed="with lockstep.spark_session(APP, MASTER): ... around the call",
            next_step='Write it within such a session, such as lockstep.spark_session("rows", "local[2]").',
        )
    columns = arrow_columns(frame, used)
    if mixed := [name for name, values in columns.items() if values is None]:
        raise ConfigError(
            f"{len(mixed)} columns have values of several types",
            got=", ".join(mixed),
            allowed="one type in a column: numbers, texts, booleans, or lists of one of them",
            next_step='Convert them, such as df["column"].astype("string"), or drop them.',
        )
    made = {name: _for_spark(values) for name, values in columns.items() if values is not None}
    return spark.createDataFrame(pa.table(made))


def _for_spark(values: pa.Array) -> pa.Array:
    if pa.types.is_null(values.type):
        return values.cast(pa.string())
    if values.type == pa.uint64():
        return values.cast(_UINT64)
    if pa.types.is_timestamp(values.type) and values.type.unit == "ns":  # Spark's times have microseconds
        return pc.floor_temporal(values, unit="microsecond").cast(pa.timestamp("us", values.type.tz))
    return values
