"""A data frame as rows of the writer: column types become field types, without loss of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.etl import columns as c
from lockstep.etl.propose import HASH_BUCKETS
from lockstep.etl.spark.errors import SameIdError, to_wire
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.config import TO_PREDICT
from lockstep.features.examples.column_checks import MAX_UINT64
from lockstep.features.schema.declare import complete_encoding
from lockstep.features.schema.encodings import Encoding
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.urls import several

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
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
    types are lists. It follows from the types alone, so equal input gives equal schemas.

    A column that may be null is a nullable field; a list and the label must not be. A model is fed numbers as they are
    and null as 0, and texts by their hash; `id_columns` are stored, and no model is fed with them.
    `lockstep.propose_schema` looks at the values too, and proposes better encodings.

    Raises ConfigError that names every column of a type without a rule, of a name that no field can have and, if there
    is a label, that no model could be trained on, with what to do about it.
    """
    have, nullable = dict(df.dtypes), {field.name: field.nullable for field in df.schema.fields}
    own = {name: kind for name, kind in have.items() if name not in _OWN}
    return schema_of(own, nullable, label, [name for name in several(exclude) if name not in _OWN], several(id_columns))


def schema_of(
    have: Mapping[str, str],
    nullable: Mapping[str, bool],
    label: str | None,
    exclude: Sequence[str],
    id_columns: Sequence[str],
) -> Schema:
    """Do what `infer_schema` does for columns by name and type in Spark's notation."""
    for name in (*exclude, *(() if label is None else (label,))):
        if name not in have:
            raise _cannot(name, "no such column", f"one of {', '.join(have)}", "Correct the name.")
    fields, faults = [sample_id_field()], list[ConfigError]()
    for name, kind in have.items():
        if name in exclude:
            continue
        stored = name in id_columns and name != label  # an id says nothing about other rows
        fault = fault_of(name, kind) or (None if stored or label is None else _untrainable(name, kind, label))
        if fault is not None:
            faults.append(fault)
            continue
        item, is_list = _item(kind)
        is_label = name == label
        may_be_null = nullable[name] and not is_list and not is_label
        fields.append(
            Field(
                name=name,
                dtype=DTYPES[item],
                shape=(None,) if is_list else (),
                kind="label" if is_label else "feature",
                nullable=may_be_null,
                encoding={"kind": "ignore"} if stored else None if is_label else _fed(item, is_list, may_be_null),
            )
        )
    if len(faults) > 1:
        raise ConfigError(
            f"{len(faults)} columns cannot be used",
            got="; ".join(f"{fault.what.split(' cannot')[0]}: {fault.got}" for fault in faults),
            allowed="; ".join(dict.fromkeys(fault.allowed for fault in faults)),
            next_step=" ".join(fault.next_step for fault in faults),
        )
    if faults:
        raise faults[0]
    return Schema(tuple(fields))


def fault_of(name: str, kind: str) -> ConfigError | None:
    """Why a column of this name and type cannot be stored without a declared schema, and what to do; None if it can."""
    if name in (SAMPLE_ID, "split") or name.startswith("_"):
        taken = f"not {SAMPLE_ID} or split, which a dataset has itself, and no `_` first"
        return _cannot(name, "its name", taken, "Rename it in a query, or exclude it.")
    item, _ = _item(kind)
    if item in DTYPES:
        return None
    whole = " A schema may declare it as uint64." if item in (UINT64, *_WIDER[UINT64]) else ""
    step = f"Use {_way(kind).format(c.named(name))} in a query, or exclude it.{whole}"
    return _cannot(name, kind, f"{', '.join(DTYPES)} and lists of them", step)


def _untrainable(name: str, kind: str, label: str) -> ConfigError | None:
    """Why no model could be trained on a column that can be stored; None if one could."""
    item, is_list = _item(kind)
    propose = f"lockstep.propose_schema(df, label='{label}') declares"
    if name == label:
        good = not is_list and item not in ("string", "binary")
        step = f"{propose} the classes of a text (lockstep etl_table --propose-schema --label {label})."
        return None if good else _cannot(name, f"a label of {kind}", "a label that is a number or a boolean", step)
    if item == "binary" or (is_list and item != "string"):
        got = f"{kind}, which no model is fed without a declared encoding"
        step = f"Exclude or drop it, or pass a schema: {propose} the length of a list."
        return _cannot(name, got, "numbers, booleans, texts and lists of texts", step)
    return None


def _fed(item: str, is_list: bool, may_be_null: bool) -> Encoding | None:
    """The encoding of a column whose values were not looked at; None for the value itself."""
    if item == "string":
        return complete_encoding({"kind": "hash", "buckets": HASH_BUCKETS}, "")
    if item == "binary" or is_list or not may_be_null:
        return None
    return {"kind": "number", "null_value": 0}


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
    check_frame(df)
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
    kept = f"{c.DROPPED} IS NULL" if c.DROPPED in have else "true"
    columns = []  # in SQL: pyspark calls Java ten times for a column of functions
    for name, kind in wanted.items():
        if name not in have:
            flag = "--id-columns" if name in id_columns else "--split" if name == split.column else "the schema"
            step = f"Correct {flag}, or make such a column in a query."
            if schema.label is not None and name == schema.label.name:
                step += TO_PREDICT
            raise _cannot(name, "no such column", f"one of {', '.join(have)}"[:1000], step)
        column = _class_of(name, have[name], schema.label, kept) if schema.label is not None else None
        column = _as(name, have[name], kind) if column is None else column
        if _item(kind)[0] == UINT64 and any(field.name == name for field in schema):
            column = _unsigned(name, column, kind, kept)
        if name in may_be_null and any(field.name == name and not field.nullable for field in schema):
            column = _held(name, column, may_be_null[name], kept)
        columns.append(f"{column} AS {c.quoted(name)}")
    columns += [name for name in (c.OCCURRENCE, c.DROPPED, c.CARRIED) if name in have]
    if placed:
        return _with_occurrence(df.selectExpr(*columns), id_columns), schema
    own = {c.SOURCE: "int", c.POSITION: "bigint"} | ({} if c.OCCURRENCE in have else {c.OCCURRENCE: "bigint"})
    return df.selectExpr(*columns, *(f"CAST(0 AS {kind}) AS {name}" for name, kind in own.items())), schema


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


def check_frame(df: DataFrame) -> None:
    """Raise ConfigError for a data frame of Spark Connect, and for names that Spark takes for one."""
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


def _as(name: str, got: str, kind: str) -> str:
    """The column `name` in SQL, widened to `kind` if that keeps each value."""
    column = c.quoted(name)
    if got == kind:
        # A moment as a number: as text it would depend on the session's time zone.
        return f"unix_micros({column})" if kind == "timestamp" else column
    (had, had_list), (item, is_list) = _item(got), _item(kind)
    if had_list == is_list and had in _WIDER.get(item, ()):
        return f"CAST({column} AS {kind})"
    if c.nested_list(got):
        way = _way(got).format(c.named(name))
        raise _cannot(name, got, kind, f"Use {way} in a query, or leave it out of the schema.")
    raise _cannot(name, got, kind, f"Cast it in a query: CAST({c.named(name)} AS {kind}), or declare it otherwise.")


def _class_of(name: str, got: str, label: Field, kept: str) -> str | None:
    """The label `name` as the number of its class or as no and yes, where the column has the names of classes, or 0 and
    1 for a boolean; a DataError out of the task for another value in a row that is kept. None for any other column.
    """
    column, names = c.quoted(name), label.class_names
    if name != label.name:
        return None
    if got == "string" and names is not None:
        # By their bytes: how SQL quotes a text is a setting of the session.
        texts = ", ".join(f"CAST(X'{one.encode().hex()}' AS STRING)" for one in names)
        place = f"(array_position(array({texts}), {column}) - 1)"
        unknown, allowed = f"{place} < 0", ", ".join(names)
        value = f"{place} = 1" if label.dtype == "bool" else place
    elif got in (*c.WHOLE, "float", "double") and label.dtype == "bool":
        unknown, allowed, value = f"{column} NOT IN (0, 1)", "0 and 1", f"{column} = 1"
    else:
        return None
    error = DataError(
        f"label `{name}` has a value that is none of its classes",
        got="another value",
        allowed=allowed[:1000],
        next_step="Add it to class_names in the schema, or drop those rows in a query.",
    )
    return _unless(f"{kept} AND {unknown}", error, value)


def _unless(wrong: str, error: DataError, value: str) -> str:
    """The value in SQL, or the error out of the task where `wrong` is true."""
    return f"CASE WHEN {wrong} THEN raise_error('{to_wire(error)}') ELSE {value} END"


def _way(kind: str) -> str:
    """What to use instead of a column whose type cannot be stored, with {0} for its name in a query."""
    if c.nested_list(kind):
        return "flatten({0}), with transform({0}, part -> size(part)) as a second column for the lengths,"
    return _INSTEAD.get(kind.partition("(")[0].partition("<")[0], "a column of one of those types")


def _held(name: str, column: str, kind: DataType, kept: str) -> str:
    """The column, which raises DataError in the task if it is null in a row that is kept, or has a null in a list.

    Written to Parquet, both would be lost without an error.
    """
    missing = f"({column}) IS NULL"
    if getattr(kind, "containsNull", False):
        missing = f"({missing} OR exists({column}, item -> item IS NULL))"
    error = DataError(
        f"field `{name}` is null",
        got="null, or a list that holds one",
        allowed="a value in each row: lists, labels and fields that are declared so are never null",
        next_step="Drop or fill those rows in a query, such as coalesce(...); an empty list stands for nothing.",
    )
    return _unless(f"{kept} AND {missing}", error, column)


def _unsigned(name: str, column: str, kind: str, kept: str) -> str:
    """The column of decimals, or a DataError out of the task where one that is kept is no uint64."""
    wrong = f"({{0}} < 0 OR {{0}} > {MAX_UINT64})"
    is_list = kind.startswith("array")
    found = f"exists({column}, item -> {wrong.format('item')})" if is_list else wrong.format(column)
    error = DataError(
        f"field `{name}` holds a number that is no uint64",
        got="a number below 0 or beyond 64 bits",
        allowed=f"0 to {MAX_UINT64}",
        next_step="Drop or correct those rows in a query, or declare the field as string.",
    )
    return _unless(f"{kept} AND {found}", error, column)


def item_of(kind: str) -> str:
    """The type of a list's values, or the type itself, in Spark's notation."""
    return _item(kind)[0]


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
