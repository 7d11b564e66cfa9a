"""The combined format of Apache and Nginx: the Common Log Format with the referrer and the user agent behind it.

    host ident user [time] "GET / HTTP/1.1" 200 203023 "http://from/" "Mozilla/5.0 (...)"

Fields behind these are passed over as in etl.logs.server_log, but a quote in a quoted string must be escaped: with
three strings in a line nobody could tell which quote ends which.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.logs.server_log import LINE, MORE, QUOTED, Requests, part, readable, requests_of
from etl.logs.values import Reasons

_REST = rf'^(?P<status>\d{{3}}|-) (?:\d+|-) "(?P<referrer>{QUOTED})" "(?P<agent>{QUOTED})"{MORE}$'

NOT_COMBINED_LOG = "not_combined_log"


def parse(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    reasons = Reasons(len(lines))
    front = pc.extract_regex(readable(lines, reasons), pattern=LINE)
    rest = pc.extract_regex(part(front, "rest"), pattern=_REST)
    reasons.add(np.asarray(pc.is_null(rest), dtype=bool), NOT_COMBINED_LOG)
    requests = requests_of(front, rest, reasons, NOT_COMBINED_LOG)
    return replace(requests, referrer=_said(part(rest, "referrer")), agent=_said(part(rest, "agent")))


def _said(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(text, "-"), "", text)
