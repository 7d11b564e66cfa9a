"""Bytes to text and text to values by Arrow's casts; where one value of a batch will not do, it alone is found out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_BOM = b"\xef\xbb\xbf"
_TRUE, _FALSE = pa.array(["1", "true", "t", "yes"]), pa.array(["0", "false", "f", "no"])
_HEX = b"0x"


def as_text(values: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Bytes (n,) binary as strings, those that are not UTF-8 or hold a NUL as null, and which these are."""
    text, broken = cast_where_possible(values, pa.string())
    if b"\0" in _content(values):
        broken |= np.asarray(pc.fill_null(pc.match_substring(values, "\0"), False), dtype=bool)
    return (pc.if_else(pa.array(~broken), text, None) if broken.any() else text), broken


def flat(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The offsets (n + 1,) and bytes of strings or binaries with offsets of any width, not copied unless they are
    views; nulls take no bytes.
    """
    wide = values.cast(pa.large_binary())
    _, ends, content = wide.buffers()
    offsets = np.frombuffer(ends, dtype=np.int64, count=len(wide) + 1, offset=wide.offset * 8)
    data = np.frombuffer(content, dtype=np.uint8) if content is not None else np.zeros(0, dtype=np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


def _content(values: pa.Array) -> bytes:
    return flat(values)[1].tobytes() if len(values) else b""


def without_bom(lines: pa.Array) -> pa.Array:
    """The lines, the first of which begins a file, without its byte order mark."""
    if len(lines) == 0 or not lines[0].as_py().startswith(_BOM):
        return lines
    return pa.concat_arrays([pa.array([lines[0].as_py()[len(_BOM) :]], type=lines.type), lines.slice(1)])


def cast_where_possible(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Cast values; returns the result, null where a value will not do, and where that is: (n,) bool.

    A batch that fails is halved until the values at fault are alone: b of n cost about 2 b log2(n / b) casts more.
    """
    return halved(values, lambda part: part.cast(kind), kind)


def halved(
    values: pa.Array, work: Callable[[pa.Array], pa.Array], kind: pa.DataType
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """What `work` makes of values, null of type `kind` for each value alone that it raises ArrowInvalid for."""
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
    """Strings (n,) as values of type `kind`, null where a string says none of that type, and where that is.

    Integers are decimal digits with a sign or none and fit 64 bits; floats are decimal and not beyond the type's
    largest, or nan and inf in any case; booleans are 1, true, t, yes and 0, false, f, no in any case; times are ISO
    8601 (a date, or date and time with a blank or T between), in UTC unless they name their offset. Blanks around any
    of these say nothing.
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


def _too_large(text: pa.Array, values: pa.Array) -> NDArray[np.bool_]:
    """Where digits became infinite, which Arrow does not mind."""
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
    """Times of which some name their offset and some do not: Arrow's cast wants all of one sort."""
    zoned, broken = cast_where_possible(text, pa.timestamp(kind.unit, "UTC"))
    plain, still = cast_where_possible(text.filter(pa.array(broken)), pa.timestamp(kind.unit))
    if len(plain):
        zoned = pc.replace_with_mask(zoned, pa.array(broken), plain.cast(zoned.type))
        broken[np.flatnonzero(broken)[~still]] = False
    return zoned.cast(kind), broken
