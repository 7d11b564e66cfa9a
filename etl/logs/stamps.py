"""The time stamps of web servers, `09/Jul/1995:00:00:00 -0400`, to seconds: arithmetic over arrays of bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.logs.text import as_values, flat

_FORM = np.frombuffer(b"00/xxx/0000:00:00:00 +0000", dtype=np.uint8)  # 0 a digit, x any byte, + a sign
_WIDTH = len(_FORM)
_DIGITS = np.flatnonzero(ord("0") == _FORM)
_FIXED = np.flatnonzero(np.isin(_FORM, np.frombuffer(b"/: ", dtype=np.uint8)))
_SIGN = _FORM.tolist().index(ord("+"))
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FIRST, _LAST = -62_135_596_800, 253_402_300_799
_CODES = np.array([int.from_bytes(name.encode()) for name in _MONTHS])


def seconds_of_stamps(stamps: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Seconds since 1970 UTC of strings (n,), which of them have the form, and which are a time that exists.

    A leap second counts as the next second; seconds are 0 where there is no time.
    """
    long_enough = np.asarray(pc.fill_null(pc.equal(pc.binary_length(stamps), _WIDTH), False), dtype=bool)
    kept = stamps.filter(pa.array(long_enough))
    shape = flat(kept)[1].reshape(len(kept), _WIDTH) if len(kept) else np.zeros((0, _WIDTH), dtype=np.uint8)
    shaped, timely = long_enough.copy(), np.zeros(len(stamps), dtype=bool)
    seconds = np.zeros(len(stamps), dtype=np.int64)
    shaped[long_enough] = good = _has_form(shape)
    seconds[shaped], timely[shaped] = _seconds(shape[good])
    seconds[~timely] = 0
    return seconds, shaped, timely


def seconds_of_text(text: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Seconds since 1970 UTC of strings (n,), and which of them are a time between the years 1 and 9999.

    A time is a number of seconds (a fraction is cut off downwards), a web server's stamp, in brackets or not, or
    ISO 8601.
    """
    text = pc.fill_null(text, "")
    seconds, good = np.zeros(len(text), dtype=np.int64), np.zeros(len(text), dtype=bool)
    left = np.arange(len(text))
    for form, read in _FORMS:
        some = text.take(pa.array(left))
        fits = np.asarray(pc.match_substring_regex(some, form), dtype=bool)
        found, known = read(some.filter(pa.array(fits)))
        seconds[left[fits]], good[left[fits]] = found, known
        left = left[~fits]
        if not len(left):
            break
    return in_range(seconds, good)


def in_range(seconds: NDArray[np.int64], good: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Times and which are good, with those outside the years 1 to 9999 taken out; what is not good becomes 0."""
    good = good & (seconds >= _FIRST) & (seconds <= _LAST)
    return np.where(good, seconds, 0), good


_Read = tuple[NDArray[np.int64], NDArray[np.bool_]]


def _whole(text: pa.Array) -> _Read:
    values, broken = as_values(text, pa.int64())
    return np.asarray(pc.fill_null(values, 0)), ~broken


def _fractional(text: pa.Array) -> _Read:
    # By its digits: a float would round 0.99999999 up.
    parts = pc.extract_regex(text, r"^\s*(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<rest>\d+)\s*$")
    whole, known = _whole(pc.binary_join_element_wise("0", parts.field("whole"), ""))
    below = np.asarray(pc.match_substring_regex(parts.field("rest"), "[1-9]"), dtype=bool)
    minus = np.asarray(pc.equal(parts.field("sign"), "-"), dtype=bool)
    return np.where(minus, -whole - below, whole), known


def _iso(text: pa.Array) -> _Read:
    values, broken = as_values(text, pa.timestamp("us"))
    return np.asarray(pc.fill_null(values.cast(pa.int64()), 0)) // 1_000_000, ~broken


def _stamped(text: pa.Array) -> _Read:
    seconds, _, timely = seconds_of_stamps(pc.replace_substring_regex(text, r"^\[(.*)\]$", r"\1"))
    return seconds, timely


_FORMS = ((r"^\s*[+-]?\d+\s*$", _whole), (r"^\s*[+-]?\d*\.\d+\s*$", _fractional), ("/", _stamped), ("", _iso))


def _has_form(stamps: NDArray[np.uint8]) -> NDArray[np.bool_]:
    digits = stamps[:, _DIGITS] - np.uint8(ord("0")) < 10  # below "0" wraps around
    fixed = stamps[:, _FIXED] == _FORM[_FIXED]
    sign = (stamps[:, _SIGN] == ord("+")) | (stamps[:, _SIGN] == ord("-"))
    return np.asarray(digits.all(axis=1) & fixed.all(axis=1) & sign)


def _seconds(stamps: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    def number(start: int, stop: int) -> NDArray[np.int64]:
        powers = 10 ** np.arange(stop - start - 1, -1, -1, dtype=np.int64)
        return (stamps[:, start:stop].astype(np.int64) - ord("0")) @ powers

    letters = stamps[:, 3:6].astype(np.int64)
    codes = (letters[:, 0] << 16) | (letters[:, 1] << 8) | letters[:, 2]
    order = np.argsort(_CODES)
    place = np.minimum(np.searchsorted(_CODES, codes, sorter=order), len(_CODES) - 1)
    month = np.where(_CODES[order[place]] == codes, order[place], -1)
    day, year, hour, minute, second = (number(*span) for span in ((0, 2), (7, 11), (12, 14), (15, 17), (18, 20)))
    months = (year - 1970) * 12 + np.maximum(month, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    after = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    offset = number(22, 26)
    good = (month >= 0) & (day >= 1) & (day <= after - first) & (hour < 24) & (minute < 60) & (second <= 60)
    good &= (offset // 100 < 24) & (offset % 100 < 60) & (year >= 1)
    local = ((first + day - 1) * 24 + hour) * 3600 + minute * 60 + second
    sign = np.where(stamps[:, _SIGN] == ord("-"), -1, 1)
    return local - sign * (offset // 100 * 3600 + offset % 100 * 60), good
