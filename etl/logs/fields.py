"""Lines of delimited fields, split by array operations over whole blocks of bytes: TSV, and CSV (RFC 4180).

In TSV a quote is an ordinary character. In CSV a field that begins with a quote ends with one, quotes inside it are
doubled, and no other field has one. Surplus fields are ignored if all of them are empty, since some writers end each
line with delimiters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.input.log_formats import DELIMITERS
from lockstep.etl.logs import json_lines
from lockstep.etl.logs.values import Reasons, as_text, as_values, bad_value, missing_value, not_of
from lockstep.etl.logs.w3c import W3C, tabbed
from lockstep.etl.reasons import (
    BAD_QUOTES,
    CARRIAGE_RETURN,
    EMPTY_LINE,
    NOT_UTF8,
    OPEN_QUOTE,
    TOO_FEW_FIELDS,
    TOO_MANY_FIELDS,
)
from lockstep.features.arrow import flat

_QUOTE, _RETURN = ord('"'), ord("\r")


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of the g good lines among n: `values` holds them line after line, `width` each, without quotes.

    `line` (n,) is each line's number among the good ones, -1 if refused; `empty` (g, width) marks empty fields,
    `quoted` (g, width) fields in quotes, None if there are none.
    """

    width: int
    values: pa.Array
    line: NDArray[np.int64]
    empty: NDArray[np.bool_]
    quoted: NDArray[np.bool_] | None

    def column(self, number: int) -> pa.Array:
        """One column as strings (g,)."""
        return self.values.take(pa.array(np.arange(number, len(self.values), self.width)))


def split_fields(lines: pa.Array, log_format: str, width: int, reasons: Reasons) -> Fields:
    """Split lines (n,) of UTF-8 strings into `width` fields each; adds to `reasons` for lines with another number of
    fields, invalid quotes, or a carriage return outside quotes, which others take for the end of a line.
    """
    offsets, data = flat(lines)
    starts, stops = offsets[:-1], offsets[1:]
    cut = data == ord(DELIMITERS[log_format])
    kept = ~cut
    returns = data == _RETURN
    quotes = data == _QUOTE if log_format == "csv" else None
    if quotes is not None and quotes.any():
        inside, dropped = _quotes(data, quotes, offsets, ord(DELIMITERS[log_format]), reasons)
        cut &= ~inside
        kept = ~cut & ~dropped
        returns &= ~inside
    if returns.any():
        reasons.add(_lines_with(returns, stops), CARRIAGE_RETURN)
    places = np.flatnonzero(cut)
    first = np.searchsorted(places, starts)
    extra = np.searchsorted(places, stops) - first - (width - 1)
    reasons.add(extra < 0, TOO_FEW_FIELDS)
    # If the surplus fields are empty, only delimiters follow the last wanted field.
    after = places[np.minimum(first + width - 1, len(places) - 1)] if len(places) else np.zeros_like(first)
    reasons.add((extra > 0) & (after != stops - extra), TOO_MANY_FIELDS)
    good = reasons.good
    ends = np.empty((int(good.sum()), width), dtype=np.int64)
    ends[:, :-1] = places[first[good][:, None] + np.arange(width - 1)]
    ends[:, -1] = np.where(extra > 0, after, stops)[good]
    begins = np.empty_like(ends)
    begins[:, 0] = starts[good]
    begins[:, 1:] = ends[:, :-1] + 1
    kept &= np.repeat(good, stops - starts)
    quoted = None
    if quotes is not None and quotes.any():
        before = _before(kept)
        lengths = before[ends] - before[begins]
        quoted = (ends > begins) & quotes[np.minimum(begins, len(quotes) - 1)]
    else:
        lengths = ends - begins
    line = np.where(good, np.cumsum(good) - 1, -1)
    return Fields(width, _strings(lengths.ravel(), data[kept]), line, lengths == 0, quoted)


def _quotes(
    data: NDArray[np.uint8], quotes: NDArray[np.bool_], offsets: NDArray[np.int64], delimiter: int, reasons: Reasons
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which bytes are inside quotes, and which quotes are not part of a field's text; refuses lines with invalid ones.

    Quotes of a line open and close in turn. An opening quote follows a delimiter, or a closing quote: the two are then
    one quote of the text. A closing quote comes before a delimiter or an opening quote.
    """
    starts, stops = offsets[:-1], offsets[1:]
    before = _before(quotes)
    inside = ((before[1:] - np.repeat(before[starts], stops - starts)) & 1).astype(bool)
    reasons.add((before[stops] - before[starts]) % 2 == 1, OPEN_QUOTE)
    full = stops > starts
    left, right = np.empty_like(data), np.empty_like(data)
    left[1:], right[:-1] = data[:-1], data[1:]
    left[starts[full]], right[stops[full] - 1] = delimiter, delimiter
    paired = quotes & inside & (left == _QUOTE)
    wrong = quotes & inside & ~paired & (left != delimiter)
    wrong |= quotes & ~inside & (right != delimiter) & (right != _QUOTE)
    if wrong.any():
        reasons.add(_lines_with(wrong, stops), BAD_QUOTES)
    return inside, quotes & ~paired


def _lines_with(marks: NDArray[np.bool_], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which lines, by their ends in the bytes (n,), have a mark: (n,)."""
    found = np.zeros(len(stops), dtype=bool)
    found[np.searchsorted(stops, np.flatnonzero(marks), side="right")] = True
    return found


def _before(marks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The number of marks before each position: (n + 1,)."""
    counts = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=counts[1:])
    return counts


def _strings(lengths: NDArray[np.int64], data: NDArray[np.uint8]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # UTF-8 text that is cut at ASCII characters is valid UTF-8.
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a log's lines. `null_texts` and `has_header` are for delimited fields; `quoted_newlines` (newlines
    inside quotes are part of a record) is for CSV.
    """

    log_format: str
    null_texts: tuple[str, ...] = ()
    has_header: bool = False
    quoted_newlines: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column to be read: its name in the file, the wanted type, whether it may be null, and whether an empty string
    is a value (never for other types). `exact` refuses whole numbers of JSON that a float would round: no schema
    declares the float.
    """

    name: str
    kind: pa.DataType
    nullable: bool = False
    may_be_empty: bool = True
    exact: bool = False

    @property
    def textual(self) -> bool:
        """Whether its values are text, so that null and empty differ."""
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

    `names` are the fields of a line in order (TSV and CSV). An empty field, or one of the null texts without quotes, is
    null in a nullable column; an empty field in quotes, or in a column that is not nullable, is an empty string if the
    column has text; otherwise the value is missing.
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
        for column in columns:
            if column.exact:
                json_lines.refuse_rounded(column.name, found[column.name], some, inner)
        place = np.arange(len(kept))
    else:
        if form.log_format == W3C:
            fields = split_fields(tabbed(some), "tsv", len(names), inner)
        else:
            fields = split_fields(some, form.log_format, len(names), inner)
        found, place = _columns(fields, names, columns, form.null_texts, inner), fields.line
    reasons.take_from(inner, kept)
    if len(kept) == len(lines) and (place >= 0).all():
        return found
    back = np.full(len(lines), -1)
    back[kept] = place
    places = pa.array(np.maximum(back, 0), mask=back < 0)
    return {name: values.take(places) for name, values in found.items()}


def _columns(
    fields: Fields,
    names: Sequence[str],
    columns: Sequence[Column],
    null_texts: Sequence[str],
    reasons: Reasons,
) -> dict[str, pa.Array]:
    lines = np.flatnonzero(fields.line >= 0)
    inner = Reasons(len(lines))
    found = {}
    for column in columns:
        if column.name not in names:  # in a section of a W3C log
            if not (column.nullable and column.may_be_empty):
                inner.add(np.ones(len(lines), dtype=bool), missing_value(column.name))
            found[column.name] = pa.nulls(len(lines), column.kind)
            continue
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
        null = np.asarray(pc.is_in(text, pa.array(null_texts, pa.string())), dtype=bool)
        none = none | (null & ~quoted)
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
