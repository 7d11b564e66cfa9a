"""The Common and the Combined Log Format, parsed by Arrow's kernels: no Python call a line.

    host ident user [09/Jul/1995:00:00:00 -0400] "GET /path?query HTTP/1.0" 200 6245 "referrer" "user agent"

Host and ident are anything without spaces, the user too or in quotes; an HTTP/0.9 request has no protocol; status and
size may be `-`. Further fields (Nginx writes some) are ignored: each one word or one quoted string. A quote in a quoted
string is written \\"; escapes stay as the server wrote them.

Lines that are not so are tried once more with looser expressions, for what servers write too: a virtual host in front
of the host, a list of proxies' addresses as host or in front of it (the first is the visitor), a user with blanks,
unescaped quotes, blanks at the end. An address alone is no virtual host, and `-` is no visitor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.logs.values import Reasons, as_text, as_values
from lockstep.etl.reasons import BAD_TIME, NOT_COMBINED_LOG, NOT_COMMON_LOG, NOT_UTF8
from lockstep.features.arrow import flat

_FORM = np.frombuffer(b"00/xxx/0000:00:00:00 +0000", dtype=np.uint8)  # 0 a digit, x any byte, + a sign
_WIDTH = len(_FORM)
_DIGITS = np.flatnonzero(ord("0") == _FORM)
_FIXED = np.flatnonzero(np.isin(_FORM, np.frombuffer(b"/: ", dtype=np.uint8)))
_SIGN = _FORM.tolist().index(ord("+"))
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FIRST, _LAST = -62_135_596_800, 253_402_300_799
_CODES = np.array([int.from_bytes(name.encode()) for name in _MONTHS])
# RE2 has a fast engine for expressions of at most four groups in which the next character decides every choice.
QUOTED = r'(?:[^"\\]|\\.)*'
MORE = rf'(?: (?:[^\s"]\S*|"{QUOTED}"))*'
USER = r'(?:[^\s"]\S*|"[^"]*")'
_STAMP = r"\[(?P<stamp>[^\]]*)\] "
_FRONT = rf"^(?P<host>\S+) \S+ {USER} {_STAMP}"
LINE = rf'{_FRONT}"(?P<request>{QUOTED})" (?P<rest>.*)$'
_STATUS = r"(?P<status>\d{3}|-) (?:\d+|-)"
_COMMON_REST = rf"^{_STATUS}{MORE}$"
_COMBINED_REST = rf'^{_STATUS} "(?P<referrer>{QUOTED})" "(?P<agent>{QUOTED})"{MORE}$'
# A virtual host is a name with a dot, or has a port; an address alone is none.
_SERVER = r"(?:[^\s,:]*(?:[^\s,:.\d][^\s,:]*\.|\.[^\s,:]*[^\s,:.\d])[^\s,:]*|[^\s,:]*:[^\s,:]*|\[[^\s,\]]*\]:\d+)"
_V4, _V6 = r"\d{1,3}(?:\.\d{1,3}){3}", r"[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?"
ADDRESS = rf"(?:{_V4}|{_V6}|\[{_V6}\])"
_LISTED = r"(?:, ?[^\s,]+)*"
# The forwarded addresses, then the proxy's own.
_PROXY_FRONT = rf"^(?P<host>{ADDRESS}){_LISTED} {ADDRESS} \S+ {USER} {_STAMP}"
# With a virtual host, a list or a user of several words only `-` can be the ident.
_ODD_FRONT = rf'^(?:{_SERVER} )?(?P<host>[^\s,]+){_LISTED} - (?:{USER}|[^\s"\[-][^"\[]*) {_STAMP}'
# Where quotes are not escaped, the last quote before status and size ends the request, and a quote before a blank or
# the line's end the other texts.
_WORDS = rf'(?: (?:[^\s"]+|"{QUOTED}"))* *$'
_FRONTS = (_FRONT, _PROXY_FRONT, _ODD_FRONT)
_COMMON_ODD = tuple(
    rf"{front}{body}"
    for body in (rf'"(?P<request>{QUOTED})" {_STATUS}{MORE} *$', rf'"(?P<request>.*)" {_STATUS} *$')
    for front in _FRONTS
)
_COMBINED_ODD = tuple(
    rf"{front}{body}"
    for body in (
        rf'"(?P<request>{QUOTED})" {_STATUS} "(?P<referrer>{QUOTED})" "(?P<agent>{QUOTED})"{MORE} *$',
        rf'"(?P<request>{QUOTED})" {_STATUS} "(?P<referrer>.*?)" "(?P<agent>.*?)"{_WORDS}',
        rf'"(?P<request>.*)" {_STATUS} "(?P<referrer>.*?)" "(?P<agent>.*?)"{_WORDS}',
    )
    for front in _FRONTS
)
_PLAIN = r"^(?P<method>[^ ]+) (?P<page>[^ ?]+)(?:\?(?P<query>[^ ]*))? HTTP/[^ ]*$"
# What clients really sent: blanks anywhere, no protocol, or one that is written otherwise (HTTP/V1.0, http/1.0).
_ODD = r"^(?P<method>[^ ]+) +(?P<target>.*?)(?: +(?i:HTTP)/[^ ]*)? *$"
_NO_VISITOR = pa.array(["", "-"])
# What a line consists of, in order, for errors
_PARTS_OF_BOTH = (
    ("a host", r"\S+"),
    ("an ident", r" \S+"),
    ("a user", rf" {USER}"),
    ("a [time]", r" \[[^\]]*\]"),
    ('a "request"', rf' "{QUOTED}"'),
    ("a status", r" (?:\d{3}|-)(?!\S)"),
    ("a size", r" (?:\d+|-)(?!\S)"),
)
_COMMON_PARTS = (*_PARTS_OF_BOTH, ("the end or further fields", rf"{MORE} *$"))
_COMBINED_PARTS = (
    *_PARTS_OF_BOTH,
    ('a "referrer"', rf' "{QUOTED}"'),
    ('a "user agent"', rf' "{QUOTED}"'),
    ("the end or further fields", rf"{MORE} *$"),
)
_LIST_OF_ADDRESSES = rf"^\s*(?:({ADDRESS})\s*,.*|([^,]*?)\s*,(?:.*,)?[\s+]*{ADDRESS}(?::\d+)?\s*)$"


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

    A time is a number of seconds (rounded down), a web server's stamp, in brackets or not, or ISO 8601.
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
    """Times and which are valid; times outside the years 1 to 9999 are not. Invalid times become 0."""
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


@dataclass(frozen=True, slots=True)
class Requests:
    """Parsed lines; each array has one entry a line, rubbish where `reasons` refuses it.

    `time` (n,) int64 seconds since 1970 UTC, `status` (n,) int64 (0 for `-`), the others Arrow strings; `query` is ""
    without `?`. `referrer` and `agent` are None for formats that do not have them, "" for `-`.
    """

    visitor: pa.Array
    method: pa.Array
    page: pa.Array
    query: pa.Array
    time: NDArray[np.int64]
    status: NDArray[np.int64]
    reasons: Reasons
    referrer: pa.Array | None = None
    agent: pa.Array | None = None


def parse_common(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    return _parsed(lines, _COMMON_REST, _COMMON_ODD, NOT_COMMON_LOG)[0]


def parse_combined(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    requests, found = _parsed(lines, _COMBINED_REST, _COMBINED_ODD, NOT_COMBINED_LOG)
    return replace(requests, referrer=_said(found["referrer"]), agent=_said(found["agent"]))


def at_not_common(text: str) -> str:
    """Where a line stops to be one of the Common Log Format."""
    return at_no_part(text, _COMMON_PARTS)


def at_not_combined(text: str) -> str:
    """Where a line stops to be one of the Combined Log Format."""
    return at_no_part(text, _COMBINED_PARTS)


def at_no_part(text: str, parts: Sequence[tuple[str, str]]) -> str:
    """Where a line stops to consist of parts, each with its name and expression; "" if it consists of them."""
    end = 0
    for name, pattern in parts:
        found = re.compile(pattern).match(text, end)
        if found is None:
            return f"column {end + 1 + (text[end : end + 1] == ' ')}, where {name} should be"
        end = found.end()
    return ""


def _said(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(text, "-"), "", text)


def _parsed(
    lines: pa.Array, rest_form: str, odd_forms: Sequence[str], no_such_log: str
) -> tuple[Requests, dict[str, pa.Array]]:
    """The requests of lines (n,) binary, and the texts of the expressions' groups, null in lines that fit none."""
    reasons = Reasons(len(lines))
    text = readable(lines, reasons)
    front = pc.extract_regex(text, pattern=LINE)
    rest = pc.extract_regex(part(front, "rest"), pattern=rest_form)
    found = {name: part(front, name) for name in ("host", "stamp", "request")}
    found |= {name: part(rest, name) for name in rest.type.names}
    failed = pc.is_null(rest)
    if pc.any(failed).as_py():
        odd = _odd(text.filter(failed), odd_forms)
        if odd["status"].null_count < len(odd["status"]):
            found = {name: pc.replace_with_mask(values, failed, odd[name]) for name, values in found.items()}
            failed = pc.is_null(found["status"])
    reasons.add(np.asarray(failed, dtype=bool), no_such_log)
    return _requests(found, reasons, no_such_log), found


def readable(lines: pa.Array, reasons: Reasons) -> pa.Array:
    """The lines as text; those that are not UTF-8, or hold a NUL, are "" and refused."""
    text, broken = as_text(lines)
    reasons.add(broken, NOT_UTF8)
    return pc.fill_null(text, "")


def _odd(text: pa.Array, forms: Sequence[str]) -> dict[str, pa.Array]:
    """The groups of the first of several expressions that fits, for each line."""
    fits = pc.extract_regex(text, pattern=forms[0])
    found = {name: part(fits, name) for name in fits.type.names}
    if len(forms) > 1 and fits.null_count:
        failed = pc.is_null(fits)
        later = _odd(text.filter(failed), forms[1:])
        found = {name: pc.replace_with_mask(values, failed, later[name]) for name, values in found.items()}
    return found


def _requests(found: Mapping[str, pa.Array], reasons: Reasons, no_such_log: str) -> Requests:
    time, shaped, timely = seconds_of_stamps(found["stamp"])
    reasons.add(~shaped, no_such_log)
    reasons.add(~timely, BAD_TIME)
    method, page, query = asked(found["request"])
    status = pc.fill_null(found["status"], "-")
    visitor = _first_of_list(found["host"])
    reasons.add(is_no_visitor(visitor), no_such_log)
    return Requests(
        visitor=visitor,
        method=method,
        page=page,
        query=query,
        time=time,
        status=np.asarray(pc.if_else(pc.equal(status, "-"), "0", status).cast(pa.int64())),
        reasons=reasons,
    )


def _first_of_list(hosts: pa.Array) -> pa.Array:
    """Hosts without the addresses behind a comma, which proxies append without a blank too."""
    if not len(hosts) or b"," not in flat(hosts)[1].tobytes():
        return hosts
    listed = pc.fill_null(pc.match_substring(hosts, ","), False)
    first = pc.list_element(pc.split_pattern(hosts.filter(listed), ",", max_splits=1), 0)
    return pc.replace_with_mask(hosts, listed, first)


def first_address(visitors: pa.Array) -> pa.Array:
    """Visitors (n,) without the addresses that proxies appended; other texts with a comma stay as they are."""
    if not len(visitors) or b"," not in flat(visitors)[1].tobytes():
        return visitors
    return pc.replace_substring_regex(visitors, _LIST_OF_ADDRESSES, r"\1\2")


def is_no_visitor(visitors: pa.Array) -> NDArray[np.bool_]:
    """Which visitors (n,) are none: nothing or `-`."""
    return np.asarray(pc.is_in(visitors, _NO_VISITOR), dtype=bool)


def asked(requests: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Methods, pages and queries of request lines; all "" if there is no target, such as for `-`."""
    parts = pc.extract_regex(requests, pattern=_PLAIN)
    odd = pc.is_null(parts)
    rest = pc.extract_regex(requests.filter(odd), pattern=_ODD)
    page, query = target_parts(part(rest, "target"))
    found = {"method": part(rest, "method"), "page": page, "query": query}
    method, page, query = (
        pc.fill_null(pc.replace_with_mask(part(parts, name), odd, values), "") for name, values in found.items()
    )
    return method, page, query


def target_parts(targets: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Pages and queries: the parts before and after the first `?`."""
    pieces = pc.extract_regex(targets, pattern=r"^(?P<page>[^?]*)\??(?P<query>.*)$")
    return pc.fill_null(part(pieces, "page"), ""), pc.fill_null(part(pieces, "query"), "")


def part(parts: pa.Array, name: str) -> pa.Array:
    """One group of an expression's matches, null where it did not match."""
    return pc.struct_field(parts, name)
