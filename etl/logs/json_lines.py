"""JSON lines by Arrow's reader: one object a line, its fields by name, each of the declared type.

Arrow's reader does not say where it fails, fails for a whole block, and ends the process on some lines that are not
objects. So Python's reader checks every line that could be something else first, and a block that fails is halved until
few lines remain, which Python's reader then checks one by one. It refuses a line only if it is sure, since the result
for a line must not depend on its neighbours. Valid lines never reach Python's reader.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from numpy.typing import NDArray

from lockstep.etl.logs.values import Column, Reasons, as_classes, as_values, bad_value, holds_nul, missing_value, not_of
from lockstep.etl.reasons import DUPLICATE_KEY, NOT_JSON, NOT_UTF8

Kinds = Mapping[str, pa.DataType]

FEW_LINES = 64
_OBJECT = r"^[ \t\r]*\{.*\}[ \t\r]*$"
# In an object only `,`, `]` or `}` may follow the end of another, and no number is NaN or Infinity, which Arrow would
# accept; a string may contain anything.
_DOUBTFUL = r"\}[ \t\r]*[^ \t\r,\]}]|[:,\[][ \t\r]*-?(?:NaN|Inf)"
_DIGITS = re.compile(r"-?[0-9]+")
_EXACT = 1 << 53  # float64 has each whole number up to it


class Refusal(NamedTuple):
    """Why a line is refused."""

    reason: str
    detail: str | None = None


def read_objects(lines: pa.Array, kinds: Kinds, reasons: Reasons) -> dict[str, pa.Array]:
    """The fields `kinds` of lines (n,) of UTF-8 strings, null where one is absent, null or its line refused.

    Other fields may hold anything. A field is refused (`bad_value`) for another JSON type than its own,
    an integer of more than 64 bits, a number with a fraction or exponent as integer, and a null inside a list. Adds to
    `reasons` for lines that are not an object and for a field that occurs twice.
    """
    _refuse_others(lines, kinds, reasons)
    schema = pa.schema([(name, _read_as(kind)) for name, kind in kinds.items()])
    good = np.flatnonzero(reasons.good)
    verdicts: list[Refusal | None] = [None] * len(good)
    parts = _read(lines.take(pa.array(good)), kinds, schema, verdicts)
    refused = {int(good[place]): verdict for place, verdict in enumerate(verdicts) if verdict is not None}
    details = {row: refusal.detail for row, refusal in refused.items() if refusal.detail is not None}
    for reason in {refusal.reason for refusal in refused.values()}:
        where = np.zeros(len(lines), dtype=bool)
        where[[row for row, refusal in refused.items() if refusal.reason == reason]] = True
        reasons.add(where, reason, details)
    still = np.flatnonzero(reasons.good)
    places = np.full(len(lines), -1, dtype=np.int64)
    places[still] = np.arange(len(still))
    back = pa.array(np.maximum(places, 0), mask=places < 0)
    table = pa.concat_tables(parts).combine_chunks() if parts else schema.empty_table()
    found = {}
    for name, kind in kinds.items():
        chunks = table.column(name)
        values = (chunks.chunk(0) if chunks.num_chunks else pa.nulls(0, chunks.type)).take(back)
        found[name] = _checked(name, kind, values, lines, reasons)
    return found


def read_keyed(
    text: pa.Array, names: Sequence[str], columns: Sequence[Column], null_texts: Sequence[str], reasons: Reasons
) -> tuple[dict[str, pa.Array], NDArray[np.int64]]:
    """Columns of JSON lines, as lockstep.etl.logs.formats.ReadColumns says; each line names its fields itself."""
    kinds = {column.name: pa.string() if column.names else column.kind for column in columns}
    read = read_objects(text, kinds, reasons)
    found = {column.name: _not_null(column, read[column.name], reasons) for column in columns}
    found |= {column.name: _classes(column, found[column.name], reasons) for column in columns if column.names}
    for column in columns:
        if column.exact:
            refuse_rounded(column.name, found[column.name], text, reasons)
    return found, np.arange(len(text))


def _not_null(column: Column, values: pa.Array, reasons: Reasons) -> pa.Array:
    if not column.nullable and values.null_count:
        reasons.add(np.asarray(values.is_null(), dtype=bool), missing_value(column.name))
    if not column.may_be_empty and column.textual:
        empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), False)
        reasons.add(np.asarray(empty, dtype=bool), missing_value(column.name))
    return values


def _classes(column: Column, values: pa.Array, reasons: Reasons) -> pa.Array:
    """The names of classes as their values; refuses rows with another text."""
    found, broken = as_classes(values, column)
    wrong = {
        row: not_of(column.kind, json.dumps(values[row].as_py(), ensure_ascii=False), column.names)
        for row in np.flatnonzero(broken).tolist()
    }
    reasons.add(broken, bad_value(column.name), wrong)
    return found


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object in a line, None if there is none."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def looks_like_json(lines: Sequence[bytes]) -> bool:
    """Whether each line is an object."""
    return all(at_no_object(line.decode("utf-8", "replace")) == "" for line in lines)


def at_no_object(text: str) -> str:
    """Where a line stops to be an object, "" if it is one."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"column {error.pos + 1}: {error.msg}"
    except (ValueError, RecursionError) as error:
        return f"{error}"[:100]
    return "" if isinstance(found, dict) else f"column 1: a {type(found).__name__}, not an object"


def _refuse_others(lines: pa.Array, kinds: Kinds, reasons: Reasons) -> None:
    reasons.add(~np.asarray(pc.match_substring_regex(lines, _OBJECT), dtype=bool), NOT_JSON)
    odd = np.asarray(pc.match_substring_regex(lines, _DOUBTFUL), dtype=bool)
    for place in np.flatnonzero(odd & reasons.good).tolist():
        refusal = why_not(lines[place].as_py(), kinds, too_deep=Refusal(NOT_JSON))
        if refusal is not None:
            where = np.zeros(len(lines), dtype=bool)
            where[place] = True
            reasons.add(where, refusal.reason, {} if refusal.detail is None else {place: refusal.detail})


def _read(lines: pa.Array, kinds: Kinds, schema: pa.Schema, verdicts: list[Refusal | None]) -> list[pa.Table]:
    """The tables of all lines but those that `verdicts` then refuses, in order."""
    parts: list[pa.Table] = []
    pending = [(0, len(lines), False)] if len(lines) else []
    while pending:
        start, count, judged = pending.pop()
        part = lines.slice(start, count)
        if judged:
            part = part.filter(pa.array([verdict is None for verdict in verdicts[start : start + count]]))
        table = _table(part, schema)
        if table is not None:
            parts.append(table)
        elif not judged and count <= FEW_LINES:
            verdicts[start : start + count] = [why_not(line, kinds) for line in part.to_pylist()]
            pending.append((start, count, True))
        elif count == 1:
            verdicts[start] = why_not(part[0].as_py(), kinds, sure=False) or Refusal(NOT_JSON)
        else:
            half = count // 2
            pending += [(start + half, count - half, judged), (start, half, judged)]
    return parts


def _table(lines: pa.Array, schema: pa.Schema) -> pa.Table | None:
    if not len(lines):
        return schema.empty_table()
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    data = pc.binary_join(whole, "\n")[0].as_buffer()
    options = {
        "read_options": pj.ReadOptions(use_threads=False, block_size=data.size + 1),
        "parse_options": pj.ParseOptions(
            explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior="ignore"
        ),
    }
    try:
        table = pj.read_json(pa.BufferReader(data), **options)
    except pa.ArrowInvalid:
        return None
    return table if len(table) == len(lines) else None


def why_not(line: str, kinds: Kinds, *, sure: bool = True, too_deep: Refusal | None = None) -> Refusal | None:
    """Why Python's reader refuses a line, None if it does not.

    With `sure` only what Arrow's reader refuses for certain counts; `too_deep` is the answer for an object that is
    nested deeper than Python reads.
    """
    try:
        document = _parsed(line)
    except ValueError:
        return Refusal(NOT_JSON)
    except RecursionError:
        return too_deep
    if not isinstance(document, _Pairs):
        return Refusal(NOT_JSON)
    seen = set()
    for name, value in document.pairs:
        if name in seen:
            return Refusal(f"{DUPLICATE_KEY}:{name}")
        if name in kinds:
            seen.add(name)
            if value is not None and not _fits(value, kinds[name], sure):
                return Refusal(bad_value(name), not_of(kinds[name], _written(value)))
    return None


def _parsed(line: str) -> Any:
    return json.loads(line, object_pairs_hook=_Pairs, parse_int=_Number, parse_float=_Number, parse_constant=_refuse)


def _written(value: Any) -> str:
    """A value about as it is written in the line."""
    if isinstance(value, _Pairs):
        return "{...}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value) if isinstance(value, _Number) else json.dumps(value)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class _Number(str):
    """A number with its digits."""


class _Pairs:
    """An object as its pairs, since a dict would drop a duplicate key."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _fits(value: Any, kind: pa.DataType, sure: bool) -> bool:
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(
            item is not None and _fits(item, kind.value_type, sure) for item in value
        )
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    number = isinstance(value, _Number)
    if pa.types.is_integer(kind):
        whole = number and len(value) < 21 and _DIGITS.fullmatch(value) is not None
        least, bits = (0, 64) if pa.types.is_unsigned_integer(kind) else (-(1 << 63), 63)
        return whole and least <= int(value) < 1 << bits
    if pa.types.is_floating(kind):
        return number and (sure or math.isfinite(float(value)))
    if pa.types.is_decimal(kind):
        return isinstance(value, str) and _is_number(value, None if sure else kind)
    return isinstance(value, str) and not number and (sure or _is_text(value))


def _is_number(text: str, kind: pa.DataType | None) -> bool:
    """Whether Python reads a number in it, for `kind` one without blanks and with room in that decimal type; Arrow
    takes fewer texts for one.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        return False
    if kind is None or not number.is_finite():
        return number.is_finite()
    places = -int(number.as_tuple().exponent)
    return text == text.strip() and places <= kind.scale and number.adjusted() < kind.precision - kind.scale


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _read_as(kind: pa.DataType) -> pa.DataType:
    """The type to ask Arrow for: it reads no bytes, and fewer times than `as_values`."""
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _read_as(kind.value_type)))
    return pa.string() if pa.types.is_binary(kind) or pa.types.is_timestamp(kind) else kind


def _checked(name: str, kind: pa.DataType, values: pa.Array, lines: pa.Array, reasons: Reasons) -> pa.Array:
    """The values in the type that was asked for; refuses rows with a null in a list, with an infinite number (JSON has
    none, so it is what became of one too large for the type), with a NUL in a text, or with a text that is no time.
    """
    listed = pa.types.is_list(values.type)
    inner = values.flatten() if listed else values
    if pa.types.is_string(inner.type) and holds_nul(inner):
        nul = np.asarray(pc.fill_null(pc.match_substring(inner, "\0"), False), dtype=bool)
        rows = np.zeros(len(values), dtype=bool)
        rows[_rows_of(values)[nul] if listed else nul] = True
        reasons.add(rows, NOT_UTF8)
    if pa.types.is_timestamp(kind):
        values, broken = as_values(values, kind)
        details = {row: _detail(lines[row].as_py(), name, kind) for row in np.flatnonzero(broken).tolist()}
        reasons.add(broken, bad_value(name), details)
        return values
    bad = np.asarray(inner.is_null(), dtype=bool) if listed else np.zeros(len(inner), dtype=bool)
    if pa.types.is_floating(inner.type):
        bad = bad | np.asarray(pc.fill_null(pc.is_inf(inner), False), dtype=bool)
    if bad.any():
        rows = np.zeros(len(values), dtype=bool)
        rows[_rows_of(values)[bad] if listed else bad] = True
        details = {row: _detail(lines[row].as_py(), name, kind) for row in np.flatnonzero(rows).tolist()}
        reasons.add(rows, bad_value(name), details)
    return values.cast(kind)


def refuse_rounded(name: str, values: pa.Array, lines: pa.Array, reasons: Reasons) -> None:
    """Refuse the rows whose floats (n,) are not the whole numbers that lines (n,) hold: they have too many digits."""
    large = np.asarray(pc.fill_null(pc.greater_equal(pc.abs(values), float(_EXACT)), False), dtype=bool)
    details = {}
    for row in np.flatnonzero(large & reasons.good).tolist():
        text = _value(lines[row].as_py(), name)
        if text is None or (_DIGITS.fullmatch(text) is not None and int(text) != int(values[row].as_py())):
            details[row] = not_of(values.type, text or "a value")
    rounded = np.zeros(len(lines), dtype=bool)
    rounded[list(details)] = True
    reasons.add(rounded, bad_value(name), details)


def _value(line: str, name: str) -> str | None:
    """A value about as it is written, None in a line that Arrow accepts and Python does not."""
    try:
        return _written(dict(_parsed(line).pairs)[name])
    except (ValueError, RecursionError):
        return None


def _detail(line: str, name: str, kind: pa.DataType) -> str:
    return not_of(kind, _value(line, name) or "a value")


def _rows_of(lists: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.list_parent_indices(lists)).astype(np.int64)
