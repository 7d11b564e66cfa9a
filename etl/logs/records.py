"""Records of a declared schema in TSV, CSV or JSON lines, such as a click log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.logs.formats import Form, read_table
from lockstep.etl.logs.parse import Found
from lockstep.etl.logs.values import Column, Reasons
from lockstep.etl.reasons import UNLABELLED
from lockstep.features.schema.fields import SAMPLE_ID, Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLACE_SCHEMA = pa.schema(
    [("_file", pa.string()), ("_position", pa.int64())]
)  # every record has these, in addition to its fields
PLACE_COLUMNS = tuple(PLACE_SCHEMA.names)
_WIDER = {"bigint": ("bigint", "int", "smallint", "tinyint"), "double": ("double", "float")}


@dataclass(frozen=True, slots=True)
class RecordLines:
    """Keeps every record with valid columns. Columns in `time_columns` become microseconds since 1970."""

    form: Form
    columns: tuple[Column, ...]
    time_columns: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns of a record and the types in which they are kept."""
        return pa.schema([(column.name, self._kept(column)) for column in self.columns])

    def parse(self, lines: pa.Array, names: Sequence[str]) -> Found:
        """Parse lines (n,) binary; `names` are the fields of a line."""
        reasons, drops = Reasons(len(lines)), Reasons(len(lines))
        found = read_table(lines, self.form, names, self.columns, reasons, drops)
        return Found({column.name: self._value(column, found[column.name]) for column in self.columns}, reasons, drops)

    def _value(self, column: Column, values: pa.Array) -> pa.Array:
        if pa.types.is_list(column.kind):  # a list is never null, but empty
            values = pc.coalesce(values, pa.scalar([], column.kind))
        return values.cast(self._kept(column))

    def _kept(self, column: Column) -> pa.DataType:
        if column.name in self.time_columns:
            return pa.int64()
        # Read as 64-bit numbers, passed on as decimals, which Spark has for them.
        listed = pa.types.is_list(column.kind)
        if (column.kind.value_type if listed else column.kind) != pa.uint64():
            return column.kind
        return Field(name=column.name, dtype="uint64", shape=(None,) if listed else ()).arrow_type


def columns_for(
    schema: Schema,
    id_columns: Sequence[str],
    others: Sequence[str],
    kinds: Mapping[str, pa.DataType],
    label: str | None,
    time_columns: Sequence[str],
) -> tuple[Column, ...]:
    """The columns to read: the fields of the schema (also the label, unless an expression gives it), ids, and `others`.

    `kinds` are the types of columns that no field declares (text by default); ids must have a value in each record.
    Raises ConfigError for a field that cannot be read from text.
    """
    found: dict[str, Column] = {}
    for field in schema:
        if field.name == SAMPLE_ID or (label is not None and field.kind == "label"):
            continue
        timed = field.name in time_columns
        if field.is_tensor:
            raise ConfigError(
                f"field `{field.name}` cannot be read from a text",
                got=f"{field.dtype} {field.shape}",
                allowed="scalars, and lists (in JSON)",
                next_step="Correct the schema.",
            )
        if timed and field.dtype != "int64":
            raise ConfigError(
                f"field `{field.name}` is one of --time-columns, and cannot hold a time",
                got=f'dtype = "{field.dtype}" in the schema',
                allowed='dtype = "int64": microseconds since 1970',
                next_step="Change its dtype, or leave it out of --time-columns.",
            )
        kind = pa.timestamp("us") if timed else field.record_type
        # An empty text counts as a missing id.
        nullable = (field.nullable or field.is_list) and field.name not in id_columns
        # JSON has yes and no, or the numbers of classes, as such too.
        classes = (field.class_names or ()) if kinds.get(field.name) == pa.string() else ()
        empty = field.name not in id_columns
        found[field.name] = Column(field.name, kind, nullable, may_be_empty=empty, names=classes)
    for name in (*id_columns, *others):
        if name not in found and name not in PLACE_COLUMNS:
            kind = pa.timestamp("us") if name in time_columns else kinds.get(name, pa.string())
            is_id = name in id_columns
            exact = pa.types.is_floating(kind)
            found[name] = Column(name, kind, nullable=not is_id, may_be_empty=not is_id, exact=exact)
    return tuple(found.values())


def label_kinds(schema: Schema) -> tuple[str, ...]:
    """The types, in Spark's notation, that an expression for the schema's label may have."""
    assert schema.label is not None
    kind = c.ddl_type(schema.label)
    return _WIDER.get(kind, (kind,))


def rows_of(records: DataFrame, schema: Schema, parser: RecordLines, label: str | None) -> DataFrame:
    """Records with the label and the writer's columns. Equal ids get no numbers: the writer refuses them."""
    names = [c.quoted(name) for name in parser.schema.names]
    kept = records.selectExpr(*names, "_file", "_position", "_source", "0L AS _occurrence")
    if label is None or schema.label is None:
        return kept
    wanted, called = c.ddl_type(schema.label), c.quoted(schema.label.name)
    labelled = kept.selectExpr("*", f"CAST(({label}) AS {wanted}) AS `_label`")
    if schema.label.name in labelled.columns:
        labelled = labelled.drop(schema.label.name)
    return labelled.withColumnRenamed("_label", schema.label.name).selectExpr(
        "*", f"IF({called} IS NULL, '{UNLABELLED}', NULL) AS _dropped"
    )
