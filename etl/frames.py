"""A schema proposed for a data frame of Spark or pandas, from its first rows and all values of its label."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.propose import MAX_CLASSES, ROWS, Asked, Proposal, Table, bad_label, proposal
from lockstep.etl.spark.errors import translating_errors
from lockstep.etl.write.frame import DTYPES, check_frame, fault_of, item_of
from lockstep.etl.write.pandas_rows import arrow_columns, is_frame, plain
from lockstep.features.arrow import ArrowTable
from lockstep.features.schema.declare import load_schema
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, nearest
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import occupied, write_file
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def propose_schema(
    df: DataFrame | pd.DataFrame | ArrowTable,
    label: str | None = None,
    *,
    embeddings: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> Schema:
    """Propose a schema for a data frame of Spark or pandas (or an Arrow table), for write_dataset.

    It follows from the first 10,000 rows, and from all values of the column `label`: 0 and 1, booleans and two texts
    become yes or no, other texts and whole numbers from 0 classes, other numbers a number to predict. Without `label`,
    a column called label, target, click or clicked is the label. With `embeddings`, categories are ids for an
    embedding, in place of a column each. `output` is a new .toml file for the schema, with a comment on each column; a
    warning names the columns that no field can hold.

    Raises ConfigError for a label that cannot be one, DataError for a frame without rows, ExistsError if the file
    exists.

    >>> import lockstep, pandas
    >>> visits = pandas.DataFrame({"hour": [n % 24 for n in range(50)], "bought": [n % 3 == 0 for n in range(50)]})
    >>> schema = lockstep.propose_schema(visits, label="bought")
    >>> [(field.name, field.dtype, field.kind) for field in schema.fields][1:]
    [('hour', 'int64', 'feature'), ('bought', 'bool', 'label')]
    """
    found = propose(df, label, embeddings=embeddings)
    if output is not None:
        write_proposal(found, absolute(output))
    if found.left_out:
        log.warning("left out of the schema: %s", c.listed(found.left_out))
    if found.doubt:
        log.warning("label %s: %s", found.label, found.doubt)
    return load_schema(found.text)


def propose(df: Any, label: str | None = None, *, embeddings: bool = False, id_columns: Sequence[str] = ()) -> Proposal:
    """The proposal for a data frame. Raises as propose_schema does."""
    asked = Asked(
        where="the data frame",
        next_step="Check the query or frame: it needs rows, and columns that a field can hold.",
        label=label,
        embeddings=embeddings,
        id_columns=id_columns,
    )
    if is_frame(df):
        return proposal(_pandas_table(df, label), asked)
    if not hasattr(df, "sparkSession"):
        raise ConfigError(
            "this is no data frame",
            got=type(df).__name__,
            allowed="a DataFrame of Spark or pandas, or a pyarrow Table",
            next_step="Pass the rows in one of these forms.",
        )
    check_frame(df)
    with translating_errors(df.sparkSession, "reading the first rows"):
        return proposal(_spark_table(df, label), asked)


def write_proposal(found: Proposal, url: str) -> None:
    """Write a proposed schema to a new file. Raises ExistsError if it exists."""
    fs = filesystem(url)
    if fs.exists(url):
        raise occupied(url)
    load_schema(found.text)
    write_file(fs, url, found.text.encode())


def _pandas_table(frame: Any, label: str | None) -> Table:
    columns = arrow_columns(frame)
    faults = {name: _no_field(values.type) for name, values in columns.items() if values is not None}
    first = [None if values is None else values.slice(0, ROWS) for values in columns.values()]
    chosen = None if label is None else columns.get(label)
    return Table(
        names=list(columns),
        columns=first,
        notes=[""] * len(columns),
        nullable=[values is not None and values.null_count > 0 for values in columns.values()],
        rows=min(ROWS, len(frame)),
        faults={name: fault for name, fault in faults.items() if fault},
        label_values=None if chosen is None else _label_values(chosen),
    )


def _label_values(values: pa.Array) -> pa.Array:
    """The distinct texts, or least and greatest number, one that is neither 0 nor 1, and null, if there are such."""
    if pa.types.is_string(values.type):
        return pc.unique(values)
    if not (pa.types.is_boolean(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return values
    span, null = pc.min_max(values), [None] if values.null_count else []
    other: list[Any] = []
    if pa.types.is_floating(values.type):
        other = values.filter(pc.invert(pc.is_in(values, pa.array([0, 1], values.type))))[:1].drop_null().to_pylist()
    return pa.array([span["min"].as_py(), span["max"].as_py(), *other, *null], values.type)


def _no_field(kind: pa.DataType) -> str:
    """Why no field holds an Arrow type; "" if one does, or if `proposal` says it."""
    if pa.types.is_temporal(kind):
        return f"it holds times ({kind}); make a number of it, such as seconds, or a text"
    if pa.types.is_decimal(kind):
        return f"it holds decimals ({kind}); make a float or a text of it"
    if pa.types.is_binary(kind):
        return "it holds bytes, which no model is fed without a declared encoding"
    return ""


def _spark_table(df: DataFrame, label: str | None) -> Table:
    if label is not None and label not in df.columns:
        raise bad_label(label, f"no such column{nearest(label, df.columns)}")
    kinds, nullable = dict(df.dtypes), {field.name: field.nullable for field in df.schema.fields}
    read = [name for name, kind in kinds.items() if item_of(kind) in DTYPES and "binary" not in kind]
    rows = df.select(*map(c.quoted, read)).limit(ROWS + 1).toArrow() if read else df.limit(0).toArrow()
    whole = len(rows) <= ROWS
    found = dict(zip(read, map(plain, rows.slice(0, ROWS).columns), strict=True))
    faults = {}
    for name in kinds.keys() - found.keys():
        fault = fault_of(name, kinds[name])
        faults[name] = f"it is of type {kinds[name]}. {fault.next_step}" if fault else _no_field(pa.binary())
    columns = [found.get(name) for name in kinds]
    return Table(
        names=list(kinds),
        columns=columns,
        notes=[""] * len(columns),
        nullable=[
            nullable[name] and (not whole or (values is not None and values.null_count > 0))
            for name, values in zip(kinds, columns, strict=True)
        ],
        rows=min(ROWS, len(rows)),
        faults=faults,
        label_values=_values_in_spark(df, label, kinds[label]) if label in found and label is not None else None,
    )


def _values_in_spark(df: DataFrame, label: str, kind: str) -> pa.Array | None:
    """Do what `_label_values` does, for all rows, in Spark."""
    from pyspark.sql import functions as f

    column = f.col(c.quoted(label))
    if kind == "string":
        return plain(df.select(column).distinct().limit(MAX_CLASSES + 2).toArrow().column(0))
    if kind.startswith("array"):
        return None
    other = f.max(f.when(~column.isin(0, 1), column)) if kind in ("float", "double") else f.lit(None)
    row = df.agg(f.min(column), f.max(column), f.max(column.isNull()), other).first()
    assert row is not None, "an aggregate without groups has one row"
    least, most, null, third = row
    more = [*([] if third is None else [third]), *([None] if null else [])]
    kinds = {"float": pa.float32(), "double": pa.float64(), "boolean": pa.bool_()}
    return pa.array([least, most, *more], kinds.get(kind, pa.int64()))
