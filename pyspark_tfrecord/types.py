"""Spark's types and ours: what a column may be in a TFRecord file that no manifest describes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from lockstep.storage.errors import ConfigError

# What tf.Example can hold of a Spark type, by its name in Field.dtype. Narrow integers are widened, which loses
# nothing; other types (decimals, times, maps, structs) have no such form.
_DTYPES: dict[type[DataType], str] = {
    ByteType: "int64",
    ShortType: "int64",
    IntegerType: "int64",
    LongType: "int64",
    BooleanType: "bool",
    FloatType: "float32",
    DoubleType: "float64",
    StringType: "string",
    BinaryType: "bytes",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column outside a dataset: dtype as in lockstep.features.schema.schema, and whether a row holds any number
    of values.
    """

    name: str
    dtype: str
    is_list: bool


def spark_schema(arrow: pa.Schema) -> StructType:
    """The Spark schema of Arrow columns."""
    return from_arrow_schema(arrow)


def arrow_schema(spark: StructType) -> pa.Schema:
    """The Arrow schema in which Spark takes columns of a Spark schema."""
    return to_arrow_schema(spark)  # no column is a time, which from Spark 4.2 on would need a zone


def columns_of(schema: StructType) -> list[Column]:
    """The columns of a Spark schema. Raises ConfigError naming one that tf.Example has no form for."""
    found = []
    for field in schema.fields:
        kind = field.dataType
        is_list = isinstance(kind, ArrayType)
        item = kind.elementType if isinstance(kind, ArrayType) else kind
        dtype = _DTYPES.get(type(item))
        if dtype is None or not field.name:
            raise ConfigError(
                f"column `{field.name}` has no form in a TFRecord file",
                got=kind.simpleString(),
                allowed="tinyint, smallint, int, bigint, boolean, float, double, string, binary, and arrays of them",
                next_step="Cast it: times to bigint or string, decimals to string or bigint; flatten structs and maps.",
            )
        found.append(Column(field.name, dtype, is_list))
    return found
