"""The columns that rows have on their way to a shard, and how declared fields look to Spark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema

# Columns that a data frame for write_dataset may have in addition to the fields: where a row comes from (required),
# which repetition of its id columns it is, which split its input names, and why it is not written.
SOURCE, POSITION, OCCURRENCE, SPLIT, DROPPED = "_source", "_position", "_occurrence", "_split", "_dropped"
# Columns of a rejected record: the path of its file below the source, if the source is a folder; why it was rejected;
# its first bytes; length and SHA-256 of the whole record.
PLACE, REASON, RAW, LENGTH, SHA256 = "_place", "_reason", "_raw", "_length", "_sha256"
REJECTED = pa.schema(
    [
        (SOURCE, pa.int32()),
        (POSITION, pa.int64()),
        (PLACE, pa.string()),
        (REASON, pa.string()),
        (RAW, pa.binary()),
        (LENGTH, pa.int64()),
        (SHA256, pa.string()),
    ]
)
PACKED = "_packed"  # whether an image is still an encoded file
# The path of the file that an image was, below its folder or in its archive.
FILE = "_file"
# What the writer adds: the order in a split as a signed number, the encoded size, and the encoded record (TFRecord).
KEY, BYTES, RECORD, SHARD = "_key", "_bytes", "_record", "_shard"
# What a row leaves for the datasets that continue this one (lockstep.etl.write.carried), a struct; and the reason in
# DROPPED of a row that is there for that alone, and counts nowhere.
CARRIED, PAST = "_carried", "_past"
# A number for the value that must not be in two splits: see lockstep.etl.split.leakage.
LEAK = "_leak"
# Types in Spark's notation: whole numbers, and nested types.
WHOLE = ("tinyint", "smallint", "int", "bigint")
NESTED = ("array", "struct", "map", "variant")
_SPARK_NAMES = {"int32": "int", "int64": "bigint", "bool": "boolean"}  # other types have one name in Arrow and Spark
_FIXED_BYTES = {"int64": 8, "float32": 4, "float64": 8, "uint64": 16, "bool": 1}
_LENGTH_BYTES = 4
MAX_LISTED = 400  # characters of names in an error
_VALUES = ("null", "true", "false", "not", "current_path")  # Spark never takes these for a column


def nested_list(kind: str) -> bool:
    """Whether a type in Spark's notation is a list of lists."""
    return kind.startswith("array<array<")


def ddl_type(field: Field) -> str:
    """The field's type in Spark's notation."""
    return spark_type(field.arrow_type)


def ddl_of(schema: pa.Schema) -> str:
    """Columns in Spark's notation."""
    return ", ".join(f"{quoted(field.name)} {spark_type(field.type)}" for field in schema)


def spark_type(kind: pa.DataType) -> str:
    """An Arrow type in Spark's notation."""
    if pa.types.is_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{quoted(part.name)}: {spark_type(part.type)}' for part in kind.fields)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _SPARK_NAMES.get(str(kind), str(kind))


def named(name: str) -> str:
    """A column's name as a query has it: in backticks where Spark needs them."""
    is_plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and name.lower() not in _VALUES
    return name if is_plain else quoted(name)


def quoted(name: str) -> str:
    """A column's name, quoted for Spark, so that dots are part of it."""
    return "`" + name.replace("`", "``") + "`"


def counted_fields(schema: Schema) -> tuple[Field, ...]:
    """The fields that are counted over all rows and therefore stay columns when records are encoded: those with a
    vocabulary or other statistics to fit, and the label if it may hold classes.
    """
    label = class_field(schema)
    return schema.fitted_fields if label is None else (*schema.fitted_fields, label)


def class_field(schema: Schema) -> Field | None:
    """The label if its values may be classes, else None."""
    label = schema.label
    return label if label is not None and not label.shape and label.dtype in ("bool", "int64", "string") else None


def listed(names: Sequence[str]) -> str:
    """The first names, whole, and how many more there are."""
    ends = accumulate(len(name) + 2 for name in names)
    shown = max(1, sum(end <= MAX_LISTED for end in ends))
    more = len(names) - shown
    return ", ".join(name[:MAX_LISTED] for name in names[:shown]) + (f" and {more} more" if more > 0 else "")


def logical_bytes(field: Field, column: pa.Array) -> pa.Array:
    """The bytes that each row of a column takes in Arrow: its values and 4 for each length, before any compression.

    Returns (n,) int64. docs/decisions/010-sizes-blocks-and-ids.md says why a Parquet shard is measured so.
    """
    if field.is_list:
        per_item = logical_bytes(Field(name=field.name, dtype=field.dtype), column.flatten())
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        totals = pc.cumulative_sum(pa.concat_arrays([pa.array([0], pa.int64()), per_item]))
        ends = pc.cumulative_sum(lengths.cast(pa.int64()))
        starts = pc.subtract(ends, lengths)
        return pc.add(pc.subtract(totals.take(ends), totals.take(starts)), _LENGTH_BYTES)
    if field.dtype in _FIXED_BYTES and not field.is_tensor:
        return pa.repeat(pa.scalar(_FIXED_BYTES[field.dtype], pa.int64()), len(column))
    lengths = pc.fill_null(pc.binary_length(column), 0).cast(pa.int64())
    return pc.add(lengths, _LENGTH_BYTES)
