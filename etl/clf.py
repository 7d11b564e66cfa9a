"""The Common Log Format, parsed by Arrow's kernels: no Python call a line.

    host ident user [09/Jul/1995:00:00:00 -0400] "GET /path?query HTTP/1.0" 200 6245

The host is anything without spaces; an HTTP/0.9 request has no protocol; the size may be `-`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_LINE = (
    r"^(?P<host>\S+) \S+ \S+ \[(?P<day>\d{2})/(?P<month>[A-Za-z]{3})/(?P<year>\d{4}):"
    r"(?P<hour>\d{2}):(?P<minute>\d{2}):(?P<second>\d{2}) (?P<zone>[+-]\d{4})\] "
    r'"(?P<request>.*)" (?P<status>\d{3}) (?:\d+|-)$'
)
_REQUEST = r"^(?P<method>[^ ]+) +(?P<target>.*?)(?: +HTTP/[0-9.]+)? *$"
_MONTHS = pa.array(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"])

NOT_UTF8 = "not_utf8"
NOT_COMMON_LOG = "not_common_log"
BAD_TIME = "bad_time"


@dataclass(frozen=True, slots=True)
class Requests:
    """Parsed lines; each array has one entry a line, rubbish where `reason` is not None.

    `time` (n,) int64 seconds since 1970 UTC, `status` (n,) int64, the others Arrow strings; `query` is "" without `?`.
    `reasons` (n,) object: None or why the line is refused.
    """

    visitor: pa.Array
    method: pa.Array
    page: pa.Array
    query: pa.Array
    time: NDArray[np.int64]
    status: NDArray[np.int64]
    reasons: NDArray[np.object_]


def parse(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    text, broken = _as_text(lines)
    parts = pc.extract_regex(text, pattern=_LINE)
    matched = np.asarray(parts.is_valid())
    time, timely = _seconds(parts)
    reasons = np.full(len(lines), None, dtype=object)
    reasons[~timely] = BAD_TIME
    reasons[~matched] = NOT_COMMON_LOG
    reasons[broken] = NOT_UTF8
    request = pc.extract_regex(_part(parts, "request"), pattern=_REQUEST)  # null where it has no target, such as "-"
    target = pc.fill_null(_part(request, "target"), "")
    pieces = pc.extract_regex(target, pattern=r"^(?P<page>[^?]*)\??(?P<query>.*)$")
    return Requests(
        visitor=_part(parts, "host"),
        method=pc.fill_null(_part(request, "method"), ""),
        page=pc.fill_null(_part(pieces, "page"), ""),
        query=pc.fill_null(_part(pieces, "query"), ""),
        time=time,
        status=_integers(_part(parts, "status")),
        reasons=reasons,
    )


def _as_text(lines: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The lines as strings, those that are not UTF-8 (or hold a NUL) as "", and which these are."""
    broken = np.asarray(pc.match_substring(lines, "\0"), dtype=bool)
    try:
        text = lines.cast(pa.string())
    except pa.ArrowInvalid:
        values = lines.to_pylist()  # some line is broken: rare, so a call a line may find which
        broken |= np.array([not _is_utf8(value) for value in values], dtype=bool)
        text = pa.array(
            [None if bad else value.decode() for bad, value in zip(broken, values, strict=True)], type=pa.string()
        )
    return pc.if_else(pa.array(~broken), text, ""), broken


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _part(parts: pa.Array, name: str) -> pa.Array:
    return pc.struct_field(parts, name)


def _integers(digits: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(digits, "0").cast(pa.int64()))


def _seconds(parts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Seconds since 1970 UTC, and where they are a time that exists (a leap second counts as the next second)."""
    month = np.asarray(pc.fill_null(pc.index_in(_part(parts, "month"), value_set=_MONTHS), -1)).astype(np.int64)
    year, day, hour, minute, second = (
        _integers(_part(parts, name)) for name in ("year", "day", "hour", "minute", "second")
    )
    months = (year - 1970) * 12 + np.maximum(month, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    after = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    zone = pc.fill_null(_part(parts, "zone"), "+0000")
    sign = np.where(np.asarray(pc.starts_with(zone, "-")), -1, 1)
    offset = np.asarray(pc.utf8_slice_codeunits(zone, 1, 5).cast(pa.int64()))
    good = (month >= 0) & (day >= 1) & (day <= after - first) & (hour < 24) & (minute < 60) & (second <= 60)
    good &= (offset // 100 < 24) & (offset % 100 < 60) & (year >= 1)
    local = ((first + day - 1) * 24 + hour) * 3600 + minute * 60 + second
    return local - sign * (offset // 100 * 3600 + offset % 100 * 60), good
