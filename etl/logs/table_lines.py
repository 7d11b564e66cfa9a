"""Columns of records in lines of TSV, CSV and JSON, as values of the types that are asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.logs import fields as delimited
from etl.logs import json_lines
from etl.logs.text import as_text, as_values
from etl.logs.values import NOT_UTF8, Reasons, bad_value, missing_value, not_of

TABLE_FORMATS = ("tsv", "csv", "json")
EMPTY_LINE = "empty_line"


@dataclass(frozen=True, slots=True)
class Form:
    """How the lines of a log are to be read. `null_texts` and `has_header` are for TSV and CSV, `quoted_newlines` (one
    inside quotes is part of a record) is for CSV.
    """

    log_format: str
    null_texts: tuple[str, ...] = ()
    has_header: bool = False
    quoted_newlines: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column to be read: its name in the file, the type wanted, whether it may be null, and whether an empty
    string will do (it never does for other types).
    """

    name: str
    kind: pa.DataType
    nullable: bool = False
    may_be_empty: bool = True

    @property
    def textual(self) -> bool:
        """Whether its values are text, so that nothing and an empty value differ."""
        return pa.types.is_string(self.kind) or pa.types.is_binary(self.kind)


def read_table(
    lines: pa.Array,
    form: Form,
    names: Sequence[str],
    columns: Sequence[Column],
    reasons: Reasons,
    drops: Reasons,
) -> dict[str, pa.Array]:
    """The columns of lines (n,) binary by name, each (n,), null in lines that `reasons` refuses or `drops` names.

    `names` are the fields of a line in order (TSV and CSV). An empty field, and any of the null texts that is not in
    quotes, is null where the column may be; in quotes, or where it may not, it is an empty string in a column of
    strings; else it is missing.
    """
    text, broken = as_text(lines)
    reasons.add(broken, NOT_UTF8)
    text = pc.fill_null(text, "")
    content = pc.ascii_trim_whitespace(text) if form.log_format == "json" else text
    drops.add(np.asarray(pc.equal(pc.binary_length(content), 0)) & ~broken, EMPTY_LINE)
    kept = np.flatnonzero(drops.good & reasons.good)
    inner = Reasons(len(kept))
    some = text if len(kept) == len(text) else text.take(pa.array(kept))
    if form.log_format == "json":
        read = json_lines.read_objects(some, {column.name: column.kind for column in columns}, inner)
        found = {column.name: _not_null(column, read[column.name], inner) for column in columns}
        place = np.arange(len(kept))
    else:
        fields = delimited.split_fields(some, form.log_format, len(names), inner)
        found, place = _columns(fields, names, columns, form.null_texts, inner), fields.line
    reasons.take_from(inner, kept)
    if len(kept) == len(lines) and (place >= 0).all():
        return found
    back = np.full(len(lines), -1)
    back[kept] = place
    places = pa.array(np.maximum(back, 0), mask=back < 0)
    return {name: values.take(places) for name, values in found.items()}


def _columns(
    fields: delimited.Fields,
    names: Sequence[str],
    columns: Sequence[Column],
    null_texts: Sequence[str],
    reasons: Reasons,
) -> dict[str, pa.Array]:
    lines = np.flatnonzero(fields.line >= 0)
    inner = Reasons(len(lines))
    found = {}
    for column in columns:
        number = names.index(column.name)
        empty = fields.empty[:, number]
        quoted = np.zeros_like(empty) if fields.quoted is None else fields.quoted[:, number]
        found[column.name] = _column(fields.column(number), empty, quoted, column, null_texts, inner)
    reasons.take_from(inner, lines)
    return found


def _column(
    text: pa.Array,
    empty: NDArray[np.bool_],
    quoted: NDArray[np.bool_],
    column: Column,
    null_texts: Sequence[str],
    reasons: Reasons,
) -> pa.Array:
    none = empty
    if column.textual and column.nullable:
        none = empty & ~quoted
    elif column.textual and column.may_be_empty:
        none = np.zeros_like(empty)
    if null_texts:
        said = np.asarray(pc.is_in(text, pa.array(null_texts, pa.string())), dtype=bool)
        none = none | (said & ~quoted)
    if none.any():
        text = pc.if_else(pa.array(~none), text, None)
        if not column.nullable:
            reasons.add(none, missing_value(column.name))
    values, broken = as_values(text, column.kind)
    if broken.any():
        wrong = {
            row: not_of(column.kind, json.dumps(text[row].as_py(), ensure_ascii=False))
            for row in np.flatnonzero(broken).tolist()
        }
        reasons.add(broken, bad_value(column.name), wrong)
    return values


def _not_null(column: Column, values: pa.Array, reasons: Reasons) -> pa.Array:
    if not column.nullable and values.null_count:
        reasons.add(np.asarray(values.is_null(), dtype=bool), missing_value(column.name))
    if not column.may_be_empty and column.textual:
        empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), False)
        reasons.add(np.asarray(empty, dtype=bool), missing_value(column.name))
    return values
