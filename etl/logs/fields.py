"""Lines of delimited fields, split by array operations over whole blocks of bytes: TSV, and CSV (RFC 4180).

In TSV a quote is an ordinary character. In CSV a field that begins with a quote ends with one, quotes inside it are
doubled, and no other field has one. Surplus fields are ignored if all of them are empty, since some writers end each
line with delimiters.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.logs.values import Column, Reasons, as_classes, bad_value, missing_value, not_of
from lockstep.etl.reasons import (
    BAD_QUOTES,
    CARRIAGE_RETURN,
    OPEN_QUOTE,
    TOO_FEW_FIELDS,
    TOO_MANY_FIELDS,
)
from lockstep.features.arrow import flat
from lockstep.storage.errors import DataError

TAB = "\t"
_QUOTE, _RETURN = ord('"'), ord("\r")
DELIMITERS = (",", ";", TAB, "|")  # the frequent ones
MAX_NAMES = 10_000


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


def split_fields(lines: pa.Array, delimiter: str, width: int, reasons: Reasons, *, quotes: bool) -> Fields:
    """Split lines (n,) of UTF-8 strings into `width` fields each, some in quotes if the format has them; adds to
    `reasons` for lines with another number of fields, invalid quotes, or a carriage return outside quotes, which others
    take for the end of a line.
    """
    offsets, data = flat(lines)
    starts, stops = offsets[:-1], offsets[1:]
    cut = data == ord(delimiter)
    kept = ~cut
    returns = data == _RETURN
    marks = data == _QUOTE if quotes else None
    if marks is not None and marks.any():
        inside, dropped = _quotes(data, marks, offsets, ord(delimiter), reasons)
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
    if marks is not None and marks.any():
        before = _before(kept)
        lengths = before[ends] - before[begins]
        quoted = (ends > begins) & marks[np.minimum(begins, len(marks) - 1)]
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


def read_fields(
    text: pa.Array,
    names: Sequence[str],
    columns: Sequence[Column],
    null_texts: Sequence[str],
    reasons: Reasons,
    *,
    delimiter: str,
    quotes: bool = False,
) -> tuple[dict[str, pa.Array], NDArray[np.int64]]:
    """Columns of delimited lines, as lockstep.etl.logs.formats.ReadColumns says.

    An empty field, or one of `null_texts` without quotes, is null in a nullable column; an empty field in quotes, or in
    a column that is not nullable, is an empty string if the column has text; otherwise the value is missing.
    """
    fields = split_fields(text, delimiter, len(names), reasons, quotes=quotes)
    return _columns(fields, names, columns, null_texts, reasons), fields.line


def names_of_header(lines: Sequence[bytes], url: str, *, delimiter: str, quotes: bool = False) -> tuple[str, ...]:
    """The names in the first line of a file. Raises DataError naming the file for one that names no fields."""
    line = lines[0] if lines else b""
    try:
        text = line.decode("utf-8")
        names = next(csv.reader([text], delimiter=delimiter, strict=True), []) if quotes else text.split(delimiter)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _bad_header(url, str(error), hint_of(line.decode("utf-8", "replace"), delimiter)) from None
    while names and not names[-1]:
        names.pop()
    if not names or len(names) > MAX_NAMES or "\0" in text or text.endswith("\r"):
        raise _bad_header(url, f"{len(names)} names, {len(line)} bytes: {line[:80]!r}")
    return tuple(names)


def _bad_header(url: str, got: str, hint: str = "") -> DataError:
    return DataError(
        f"the first line of {url} names no fields",
        got=got,
        allowed=f"1 to {MAX_NAMES} names in UTF-8 with the format's delimiter between them",
        next_step=hint or "Check --log-format; name the fields by --columns if the file has no header.",
    )


def flags_of(delimiter: str) -> str:
    """The value of --log-format, with a further flag, for CSV of this delimiter."""
    if delimiter == ",":
        return "csv, without --delimiter"
    return f"csv --delimiter {repr(TAB) if delimiter == TAB else shlex.quote(delimiter)}"


def hint_of(header: str, delimiter: str | None = None) -> str:
    """What to do about the first line of a file, which `delimiter` does not cut: the frequent one that cuts it into the
    most fields; "" if none does.
    """
    counts = {other: len(_cells(header, other)) for other in DELIMITERS if other != delimiter}
    best = max(counts, key=lambda other: counts[other])
    if counts[best] < 2 or (delimiter is not None and delimiter in header):
        return ""
    flags = flags_of(best)
    return f"The first line has {json.dumps(best)} between its fields: lockstep etl_logs --log-format {flags} reads it."


def looks_delimited(lines: Sequence[bytes], *, delimiter: str) -> bool:
    """Whether lines have the same number of fields, and more than one."""
    counts = {len(_cells(line.decode("utf-8", "replace"), delimiter)) for line in lines}
    return len(counts) == 1 and min(counts) > 1


def after_fields(text: str, *, delimiter: str, quotes: bool = False) -> str:
    """Where a line of too few or too many fields stops to fit."""
    count = len(_cells(text, delimiter)) if quotes else text.count(delimiter) + 1
    return f"its end, after {count} fields"


def at_wrong_quote(text: str, *, delimiter: str) -> str:
    """The place of the first quote that neither opens, closes nor is doubled."""
    opened = 0
    state = "start"
    for place, letter in enumerate(text):
        if state == "quoted":
            state = "closed" if letter == '"' else "quoted"
        elif letter == '"' and state == "plain":
            return f"column {place + 1}, a quote inside a field"
        elif letter == '"':
            opened, state = (place, "quoted") if state == "start" else (opened, "quoted")
        elif letter == delimiter:
            state = "start"
        elif state == "closed":
            return f"column {place + 1}, text behind a closing quote"
        else:
            state = "plain"
    return f"its end: the quote of column {opened + 1} is not closed" if state == "quoted" else ""


def _cells(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([text.replace("\n", " ")], delimiter=delimiter), [])
    except csv.Error:
        return []


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
    values, broken = as_classes(text, column)
    if broken.any():
        wrong = {
            row: not_of(column.kind, json.dumps(text[row].as_py(), ensure_ascii=False), column.names)
            for row in np.flatnonzero(broken).tolist()
        }
        reasons.add(broken, bad_value(column.name), wrong)
    return values
