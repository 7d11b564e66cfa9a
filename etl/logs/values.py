"""Conversion of text to values, and the reasons for which rows of a batch are refused; the first reason counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.input.files import BOM
from lockstep.etl.reasons import BAD_VALUE, MISSING_VALUE
from lockstep.features.arrow import flat

TIME = "time in ISO 8601"
_SHOWN = 60  # characters of a value
_TYPES = {"float": "float32", "double": "float64", "binary": "bytes"}
_TRUE, _FALSE = pa.array(["1", "true", "t", "yes"]), pa.array(["0", "false", "f", "no"])
_HEX = b"0x"


def bad_value(name: str) -> str:
    """The reason of a record whose column `name` has no valid value of its type."""
    return f"{BAD_VALUE}:{name}"


def not_of(kind: pa.DataType, value: str, names: Sequence[str] = ()) -> str:
    """The detail of `bad_value`: the value as written in the record, and the type or one of the names wanted."""
    wanted = f"none of class_names {', '.join(names)[:_SHOWN]}" if names else f"no {_called(kind)}"
    return f"{value if len(value) <= _SHOWN else value[:_SHOWN] + '...'} is {wanted}"


def _called(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_called(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return TIME
    if pa.types.is_decimal(kind):
        whole = f"number of up to {kind.precision - kind.scale} digits"
        return f"{whole} and {kind.scale} after the point" if kind.scale else f"whole {whole}"
    return _TYPES.get(str(kind), str(kind))


def missing_value(name: str) -> str:
    """The reason of a record whose required column `name` is missing."""
    return f"{MISSING_VALUE}:{name}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column to be read: its name in the file, the wanted type, whether it may be null, and whether an empty string
    is a value (never for other types). `exact` refuses whole numbers of JSON that a float would round: no schema
    declares the float. `names` are the texts of a label that are no, yes or its classes, by number.
    """

    name: str
    kind: pa.DataType
    nullable: bool = False
    may_be_empty: bool = True
    exact: bool = False
    names: tuple[str, ...] = ()

    @property
    def textual(self) -> bool:
        """Whether its values are text, so that null and empty differ."""
        return pa.types.is_string(self.kind) or pa.types.is_binary(self.kind)


class Reasons:
    """One reason, or none, for each of n rows; a row may add a detail to its reason."""

    def __init__(self, count: int) -> None:
        self._codes = np.zeros(count, dtype=np.int32)
        self._names: list[str | None] = [None]
        self._details: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, where: NDArray[np.bool_], reason: str, details: Mapping[int, str] | None = None) -> None:
        """Refuse the rows `where` (n,) for `reason`, unless they have a reason already; `details` by row."""
        if not where.any():
            return
        if reason not in self._names:
            self._names.append(reason)
        where = where & (self._codes == 0)
        self._codes[where] = self._names.index(reason)
        if details:
            self._details |= {row: details[row] for row in np.flatnonzero(where).tolist() if row in details}

    def where(self, reason: str) -> NDArray[np.bool_]:
        """Which rows are refused for `reason`: (n,) bool."""
        if reason not in self._names:
            return np.zeros(len(self), dtype=bool)
        return self._codes == self._names.index(reason)

    def replace(self, other: Reasons, where: NDArray[np.bool_]) -> None:
        """Replace the reasons of the rows `where` (n,) by those of `other`, which is about these rows."""
        self._codes[where] = 0
        self._details = {row: detail for row, detail in self._details.items() if not where[row]}
        self.take_from(other, np.flatnonzero(where))

    @property
    def good(self) -> NDArray[np.bool_]:
        """Which rows are not refused: (n,) bool."""
        return self._codes == 0

    def names(self, where: NDArray[np.bool_]) -> pa.Array:
        """The reasons of the rows `where` with their details, as strings; null for good rows."""
        names = pa.DictionaryArray.from_arrays(
            pa.array(self._codes[where]), pa.array(self._names, type=pa.string())
        ).dictionary_decode()
        if not self._details:
            return names
        details = pa.array([self._details.get(row) for row in np.flatnonzero(where).tolist()], pa.string())
        return pc.coalesce(pc.binary_join_element_wise(names, details, ": "), names)

    def counts(self, where: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """How many rows, of all or of those `where`, each reason refuses."""
        codes = self._codes if where is None else self._codes[where]
        found = np.bincount(codes, minlength=len(self._names)).tolist()
        return {name: n for name, n in zip(self._names, found, strict=True) if name is not None and n}

    def tolist(self) -> list[str | None]:
        """The reason of each row, None for a good one."""
        return [self._names[code] for code in self._codes.tolist()]

    def take_from(self, other: Reasons, places: NDArray[np.int64]) -> None:
        """Refuse the rows that `other` refuses; its rows are at `places` (m,) of these."""
        details = {int(places[row]): detail for row, detail in other._details.items()}
        for code, name in enumerate(other._names):
            if name is not None:
                mine = np.zeros(len(self), dtype=bool)
                mine[places[other._codes == code]] = True
                self.add(mine, name, details)


def as_text(values: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Bytes (n,) binary as strings, those that are not UTF-8 or hold a NUL as null, and which these are."""
    text, broken = cast_where_possible(values, pa.string())
    if holds_nul(values):
        broken |= np.asarray(pc.fill_null(pc.match_substring(values, "\0"), False), dtype=bool)
    return (pc.if_else(pa.array(~broken), text, None) if broken.any() else text), broken


def holds_nul(values: pa.Array) -> bool:
    """Whether one of some texts or bytes holds a NUL."""
    return b"\0" in _content(values)


def _content(values: pa.Array) -> bytes:
    return flat(values)[1].tobytes() if len(values) else b""


def without_bom(lines: pa.Array) -> pa.Array:
    """The lines, the first of which begins a file, without its byte order mark."""
    if len(lines) == 0 or not lines[0].as_py().startswith(BOM):
        return lines
    return pa.concat_arrays([pa.array([lines[0].as_py()[len(BOM) :]], type=lines.type), lines.slice(1)])


def cast_where_possible(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Cast values; returns the result, null for invalid values, and which are invalid: (n,) bool.

    A batch that fails is halved until each invalid value is by itself: b of n cost about 2 b log2(n / b) more casts.
    """
    return halved(values, lambda part: part.cast(kind), kind)


def halved(
    values: pa.Array, work: Callable[[pa.Array], pa.Array], kind: pa.DataType
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The result of `work` for values, null of type `kind` for each value for which it raises ArrowInvalid."""
    done: list[pa.Array] = []
    broken = np.zeros(len(values), dtype=bool)
    pending = [(0, len(values))]
    while pending:
        start, count = pending.pop()
        try:
            done.append(work(values.slice(start, count)))
        except pa.ArrowInvalid:
            if count == 1:
                broken[start] = True
                done.append(pa.nulls(1, kind))
            else:
                half = count // 2
                pending += [(start + half, count - half), (start, half)]
    return (done[0] if len(done) == 1 else pa.concat_arrays(done)), broken


def as_values(text: pa.Array, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Strings (n,) as values of type `kind`, null for strings that are not such values, and which these are.

    Integers are decimal digits with a sign or none and fit 64 bits; floats are decimal and not beyond the type's
    largest, or nan and inf in any case; booleans are 1, true, t, yes and 0, false, f, no in any case; times are ISO
    8601 (a date, or date and time with a blank or T between), in UTC unless they name their offset, rounded down to
    microseconds. Blanks around them are ignored.
    """
    if pa.types.is_string(kind):
        return text, np.zeros(len(text), dtype=bool)
    if pa.types.is_binary(kind):
        return text.cast(kind), np.zeros(len(text), dtype=bool)
    if pa.types.is_boolean(kind):
        return _booleans(text)
    try:
        values, broken = text.cast(kind), np.zeros(len(text), dtype=bool)
    except pa.ArrowInvalid:
        text = pc.utf8_trim_whitespace(text)
        if pa.types.is_timestamp(kind):
            return _times(text, kind)
        text = pc.replace_substring_regex(text, r"^\+(\d)", r"\1") if pa.types.is_integer(kind) else text
        values, broken = cast_where_possible(text, kind)
    odd = _too_large(text, values) if pa.types.is_floating(kind) else _hexadecimal(text, values)
    return (pc.if_else(pa.array(~odd), values, None), broken | odd) if odd.any() else (values, broken)


def as_classes(text: pa.Array, column: Column) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Strings (n,) as values of a column: its names as their numbers (of two for a bool, the second is yes), other
    texts as `as_values` does. Returns what that returns.
    """
    if not column.names:
        return as_values(text, column.kind)
    place = pc.index_in(text, pa.array(column.names, pa.string()))
    values, broken = as_values(pc.if_else(place.is_valid(), None, text), column.kind)
    numbers = pc.equal(place, 1) if pa.types.is_boolean(column.kind) else place.cast(column.kind)
    return pc.coalesce(numbers, values), broken


def _too_large(text: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
    """The values that became infinite, which Arrow accepts."""
    infinite = pc.fill_null(pc.is_inf(values), False)
    if not pc.any(infinite).as_py():
        return np.zeros(len(text), dtype=bool)
    return np.asarray(pc.and_(infinite, pc.match_substring_regex(pc.fill_null(text, ""), r"\d")), dtype=bool)


def _hexadecimal(text: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
    """Where Arrow read 0x1F as a number: a column of digits that holds one is more likely not what it is taken for."""
    content = _content(text)
    if not pa.types.is_integer(values.type) or (_HEX not in content and _HEX.upper() not in content):
        return np.zeros(len(text), dtype=bool)
    return np.asarray(pc.match_substring_regex(pc.fill_null(text, ""), "[xX]"), dtype=bool)


def _booleans(text: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    lower = pc.ascii_lower(pc.utf8_trim_whitespace(text))
    true, false = pc.is_in(lower, _TRUE), pc.is_in(lower, _FALSE)
    known = np.asarray(pc.or_(pc.or_(true, false), pc.is_null(text)), dtype=bool)
    return pc.if_else(pc.or_(true, false), true, None), ~known


def _times(text: pa.Array, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Times with and without an offset: Arrow's cast accepts only one kind at a time, and no more than 6 digits of a
    second's fraction. Further ones, as of nanoseconds, are cut: the time is rounded down.
    """
    text = pc.replace_substring_regex(text, r"(:\d\d\.\d{6})\d+", r"\1")
    zoned, broken = cast_where_possible(text, pa.timestamp(kind.unit, "UTC"))
    plain, still = cast_where_possible(text.filter(pa.array(broken)), pa.timestamp(kind.unit))
    if len(plain):
        zoned = pc.replace_with_mask(zoned, pa.array(broken), plain.cast(zoned.type))
        broken[np.flatnonzero(broken)[~still]] = False
    return zoned.cast(kind), broken
