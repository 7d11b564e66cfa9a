"""A data frame as rows of the writer: column types become field types, without loss of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from etl import columns as c
from etl.spark.errors import SameIdError, to_wire
from etl.split.splits import SplitSpec
from lockstep.features.examples.column_checks import MAX_UINT64
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.urls import several

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

DTYPES = {
    "boolean": "bool",
    "tinyint": "int64",
    "smallint": "int64",
    "int": "int64",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "binary": "bytes",
}
UINT64 = "decimal(20,0)"  # what Spark reads a Parquet file's unsigned numbers of 64 bits as
# Casts that keep every value.
_WIDER = {
    "bigint": ("tinyint", "smallint", "int"),
    "double": ("float",),
    UINT64: (*c.WHOLE, *(f"decimal({digits},0)" for digits in range(1, 20))),
}
_INSTEAD = {
    "decimal": "CAST({0} AS STRING), which keeps each digit, or CAST({0} AS DOUBLE), which is the nearest number,",
    "timestamp": "unix_micros({0}), or unix_seconds({0})",
    "timestamp_ntz": "unix_micros(to_utc_timestamp({0}, 'ZONE'))",
    "date": "unix_date({0})",
    "struct": "its parts, such as {0}.part",
    "map": "map_values({0}), or single keys of it",
    "array": "transform({0}, item -> ...) to a list of one of those types",
}
_OWN = (c.SOURCE, c.POSITION, c.OCCURRENCE, c.SPLIT, c.DROPPED)
MAX_NAMED = 2


def infer_schema(
    df: DataFrame, label: str | None = None, exclude: str | Sequence[str] = (), id_columns: str | Sequence[str] = ()
) -> Schema:
    """A schema of all columns of `df` but the writer's own and those that `exclude` names, by DTYPES; lists of those
    types are lists. A column that may be null is a nullable field; a list and the label must not be. `id_columns` are
    stored, and no model is fed with them.

    Raises ConfigError for a type without a rule, naming what to do, and for a name that no field can have.
    """
    have, exclude, id_columns = dict(df.dtypes), several(exclude), several(id_columns)
    for name in (*exclude, *(() if label is None else (label,))):
        if name not in have:
            raise _cannot(name, "no such column", f"one of {', '.join(have)}", "Correct the name.")
    nullable = {field.name: field.nullable for field in df.schema.fields}
    fields = [sample_id_field()]
    for name, kind in have.items():
        if name in _OWN or name in exclude:
            continue
        if name in (SAMPLE_ID, "split") or name.startswith("_"):
            taken = f"not {SAMPLE_ID} or split, which a dataset has itself, and no `_` first"
            raise _cannot(name, "its name", taken, "Rename it in a query, or exclude it.")
        item, is_list = _item(kind)
        if item not in DTYPES:
            way = _way(kind).format(name)
            whole = " A schema may declare it as uint64." if item in (UINT64, *_WIDER[UINT64]) else ""
            step = f"Use {way} in a query, or exclude it.{whole}"
            raise _cannot(name, kind, f"{', '.join(DTYPES)} and lists of them", step)
        is_label = name == label
        fields.append(
            Field(
                name=name,
                dtype=DTYPES[item],
                shape=(None,) if is_list else (),
                kind="label" if is_label else "feature",
                nullable=nullable[name] and not is_list and not is_label,
                # An id says nothing about other rows; besides, Spark takes the ids of most tables for nullable.
                encoding={"kind": "ignore"} if name in id_columns and not is_label else None,
            )
        )
    return Schema(tuple(fields))


def prepared(
    df: DataFrame,
    schema: Schema | None,
    id_columns: Sequence[str],
    split: SplitSpec,
    label: str | None = None,
    also: Sequence[str] = (),
) -> tuple[DataFrame, Schema]:
    """`df` with just the columns that the writer uses, each of its type, and the schema, inferred where it is None.
    `also` names further columns to keep.

    Without `_source` and `_position` all rows count as from one place, with unique ids. Raises ConfigError for a
    missing column or one of another type.
    """
    from pyspark.sql import functions as f

    _check_frame(df)
    if schema is None:
        schema = infer_schema(df, label, (), id_columns)
    elif label is not None and (schema.label is None or schema.label.name != label):
        got = "none" if schema.label is None else schema.label.name
        raise ConfigError(
            f"the schema's label is not `{label}`", got=got, allowed=label, next_step="Declare it so, or leave one out."
        )
    if not id_columns:
        raise ConfigError(
            "no id columns", got="none", allowed="one or more", next_step="Name the columns that identify a row."
        )
    have = dict(df.dtypes)
    wanted = {field.name: c.ddl_type(field) for field in schema if field.name != SAMPLE_ID}
    placed = c.SOURCE in have or c.POSITION in have
    wanted |= {c.SOURCE: "int", c.POSITION: "bigint"} if placed else {}
    wanted |= {c.SPLIT: "string"} if split.given else {}
    for name in (*id_columns, *also, *(() if split.column is None else (split.column,))):
        wanted.setdefault(name, have.get(name, "a column"))
        if wanted[name].partition("<")[0] in c.NESTED:
            raise _cannot(name, wanted[name], "a number, text, bytes, boolean, date or time", "Name another column.")
    may_be_null = {field.name: field.dataType for field in df.schema.fields if field.nullable}
    kept = f.col(c.DROPPED).isNull() if c.DROPPED in have else f.lit(True)
    columns = []
    for name, kind in wanted.items():
        if name not in have:
            flag = "--id-columns" if name in id_columns else "--split" if name == split.column else "the schema"
            step = f"Correct {flag}, or make such a column in a query."
            raise _cannot(name, "no such column", f"one of {', '.join(have)}"[:1000], step)
        column = _as(name, have[name], kind)
        if _item(kind)[0] == UINT64 and any(field.name == name for field in schema):
            column = _unsigned(name, column, kind, kept)
        never_null = any(field.name == name and not field.nullable for field in schema)
        columns.append(_held(name, column, may_be_null[name], kept) if never_null and name in may_be_null else column)
    columns += [f.col(name) for name in (c.OCCURRENCE, c.DROPPED, c.CARRIED) if name in have]
    if placed:
        return _with_occurrence(df.select(*columns), id_columns), schema
    own = {c.SOURCE: "int", c.POSITION: "bigint"} | ({} if c.OCCURRENCE in have else {c.OCCURRENCE: "bigint"})
    return df.select(*columns, *(f.lit(0).cast(kind).alias(name) for name, kind in own.items())), schema


def named_repeats(df: DataFrame, id_columns: Sequence[str]) -> SameIdError | None:
    """The error that names ids which several rows of `df` have, or None. Null is not an id."""
    from pyspark.sql import functions as f

    kept = df.where(f.col(c.DROPPED).isNull()) if c.DROPPED in df.columns else df
    ids = [c.quoted(name) for name in id_columns]
    for name in ids:
        kept = kept.where(f.col(name).isNotNull())
    found = kept.groupBy(*ids).agg(f.count(f.lit(1)).alias("_rows")).where("_rows > 1").orderBy(*ids)
    rows = found.limit(MAX_NAMED).collect()
    if not rows:
        return None
    repeats = (", ".join(f"{name} = {row[name]!r}" for name in id_columns) + f" in {row['_rows']} rows" for row in rows)
    return SameIdError(
        "rows have the same id columns",
        got="; ".join(repeats),
        allowed=f"{', '.join(id_columns)} unique, since the rows of a table have no order to number them by",
        next_step="Name more id columns, or take each row only once (SELECT DISTINCT).",
    )


def _check_frame(df: DataFrame) -> None:
    if not hasattr(df, "_jdf"):
        raise ConfigError(
            "a data frame of Spark Connect cannot be written as a dataset",
            got=type(df).__module__,
            allowed="a data frame of a classic session, in whose driver this code runs",
            next_step="Start the session with spark-submit or a master.",
        )
    counts = Counter(name.lower() for name in df.columns)  # Spark takes Name and name for one
    twice = [name for name in df.columns if counts[name.lower()] > 1]
    if twice:
        raise _cannot(twice[0], f"there {counts[twice[0].lower()]} times", "each name once", "Rename them in a query.")


def _as(name: str, got: str, kind: str) -> Column:
    """The column `name`, widened to `kind` if that keeps each value."""
    from pyspark.sql import functions as f

    column = f.col(c.quoted(name))
    if got == kind:
        # A moment as a number: as text it would depend on the session's time zone.
        return f.unix_micros(column).alias(name) if kind == "timestamp" else column
    (had, had_list), (item, is_list) = _item(got), _item(kind)
    if had_list == is_list and had in _WIDER.get(item, ()):
        return column.cast(kind).alias(name)
    if c.nested_list(got):
        raise _cannot(name, got, kind, f"Use {_way(got).format(name)} in a query, or leave it out of the schema.")
    raise _cannot(name, got, kind, f"Cast it in a query: CAST({name} AS {kind}), or declare it otherwise.")


def _way(kind: str) -> str:
    """What to use instead of a column whose type cannot be stored, with {0} for its name."""
    if c.nested_list(kind):
        return "flatten({0}), with transform({0}, part -> size(part)) as a second column for the lengths,"
    return _INSTEAD.get(kind.partition("(")[0].partition("<")[0], "a column of one of those types")


def _held(name: str, column: Column, kind: DataType, kept: Column) -> Column:
    """The column, which raises DataError in the task if it is null in a row that is kept, or has a null in a list.

    Written to Parquet, both would be lost without an error.
    """
    from pyspark.sql import functions as f

    missing = column.isNull()
    if getattr(kind, "containsNull", False):
        missing = missing | f.exists(column, lambda item: item.isNull())
    error = DataError(
        f"field `{name}` is null",
        got="null, or a list that holds one",
        allowed="a value in each row: lists, labels and fields that are declared so are never null",
        next_step="Drop or fill those rows in a query, such as coalesce(...); an empty list stands for nothing.",
    )
    return f.when(kept & missing, f.raise_error(f.lit(to_wire(error)))).otherwise(column).alias(name)


def _unsigned(name: str, column: Column, kind: str, kept: Column) -> Column:
    """The column of decimals, or a DataError out of the task where one that is kept is no uint64."""
    from pyspark.sql import functions as f

    def wrong(value: Column) -> Column:
        return (value < 0) | (value > Decimal(MAX_UINT64))

    found = f.exists(column, wrong) if kind.startswith("array") else wrong(column)
    error = DataError(
        f"field `{name}` holds a number that is no uint64",
        got="a number below 0 or beyond 64 bits",
        allowed=f"0 to {MAX_UINT64}",
        next_step="Drop or correct those rows in a query, or declare the field as string.",
    )
    return f.when(kept & found, f.raise_error(f.lit(to_wire(error)))).otherwise(column).alias(name)


def _item(kind: str) -> tuple[str, bool]:
    is_list = kind.startswith("array<") and kind.endswith(">")
    return (kind[6:-1], True) if is_list else (kind, False)


def _with_occurrence(df: DataFrame, id_columns: Sequence[str]) -> DataFrame:
    if c.OCCURRENCE in df.columns:
        return df
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy(*map(c.quoted, id_columns)).orderBy(c.SOURCE, c.POSITION)
    return df.withColumn(c.OCCURRENCE, (f.row_number().over(order) - 1).cast("bigint"))


def _cannot(name: str, got: str, allowed: str, next_step: str) -> ConfigError:
    return ConfigError(f"column `{name}` cannot be used", got=got, allowed=allowed, next_step=next_step)
