"""The Common Log Format, parsed by Arrow's kernels: no Python call a line.

    host ident user [09/Jul/1995:00:00:00 -0400] "GET /path?query HTTP/1.0" 200 6245

Host and ident are anything without spaces, the user too or in quotes; an HTTP/0.9 request has no protocol; status and
size may be `-`. Fields behind these (Nginx writes some) are passed over: each one word or one quoted string. A quote in
a quoted string is written \\"; what servers escape stays as it stands in the log.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.logs.stamps import seconds_of_stamps
from etl.logs.text import as_text
from etl.logs.values import NOT_UTF8, Reasons

# RE2 has a fast engine for expressions of four groups at most whose every choice the next character decides.
QUOTED = r'(?:[^"\\]|\\.)*'
MORE = rf'(?: (?:[^\s"]\S*|"{QUOTED}"))*'
_FRONT = r'^(?P<host>\S+) \S+ (?:[^\s"]\S*|"[^"]*") \[(?P<stamp>[^\]]*)\] '
LINE = rf'{_FRONT}"(?P<request>{QUOTED})" (?P<rest>.*)$'
_REST = rf"^(?P<status>\d{{3}}|-) (?:\d+|-){MORE}$"
# Old servers wrote quotes as they came; then the last quote before status and size ends the request.
_LOOSE = rf'{_FRONT}"(?P<request>.*)" (?P<rest>(?:\d{{3}}|-) (?:\d+|-))$'
_PLAIN = r"^(?P<method>[^ ]+) (?P<page>[^ ?]+)(?:\?(?P<query>[^ ]*))? HTTP/[^ ]*$"
# What clients really sent: blanks anywhere, no protocol, or one that is written otherwise (HTTP/V1.0, http/1.0).
_ODD = r"^(?P<method>[^ ]+) +(?P<target>.*?)(?: +(?i:HTTP)/[^ ]*)? *$"

NOT_COMMON_LOG = "not_common_log"
BAD_TIME = "bad_time"


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


def parse(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    reasons = Reasons(len(lines))
    text = readable(lines, reasons)
    front = pc.extract_regex(text, pattern=LINE)
    rest = pc.extract_regex(part(front, "rest"), pattern=_REST)
    failed = pc.is_null(rest)
    if pc.any(failed).as_py():
        loose = pc.extract_regex(text.filter(failed), pattern=_LOOSE)
        columns = {
            name: pc.replace_with_mask(part(front, name), failed, part(loose, name)) for name in front.type.names
        }
        front = pa.StructArray.from_arrays(list(columns.values()), list(columns))
        rest = pc.extract_regex(columns["rest"], pattern=_REST)
    reasons.add(np.asarray(pc.is_null(rest), dtype=bool), NOT_COMMON_LOG)
    return requests_of(front, rest, reasons, NOT_COMMON_LOG)


def readable(lines: pa.Array, reasons: Reasons) -> pa.Array:
    """The lines as text; those that are not UTF-8, or hold a NUL, are "" and refused."""
    text, broken = as_text(lines)
    reasons.add(broken, NOT_UTF8)
    return pc.fill_null(text, "")


def requests_of(front: pa.Array, rest: pa.Array, reasons: Reasons, no_such_log: str) -> Requests:
    """Requests from structs of (host, stamp, request) and (status) strings, null where a line has not the form."""
    time, shaped, timely = seconds_of_stamps(part(front, "stamp"))
    reasons.add(~shaped, no_such_log)
    reasons.add(~timely, BAD_TIME)
    method, page, query = asked(part(front, "request"))
    status = pc.fill_null(part(rest, "status"), "-")
    return Requests(
        visitor=part(front, "host"),
        method=method,
        page=page,
        query=query,
        time=time,
        status=np.asarray(pc.if_else(pc.equal(status, "-"), "0", status).cast(pa.int64())),
        reasons=reasons,
    )


def asked(requests: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Methods, pages and queries of request lines; all "" where there is no target, such as for `-`."""
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
    """Pages and queries: what stands before and behind the first `?`."""
    pieces = pc.extract_regex(targets, pattern=r"^(?P<page>[^?]*)\??(?P<query>.*)$")
    return pc.fill_null(part(pieces, "page"), ""), pc.fill_null(part(pieces, "query"), "")


def part(parts: pa.Array, name: str) -> pa.Array:
    """One group of an expression's matches, null where it did not match."""
    return pc.struct_field(parts, name)
