"""The access log of AWS load balancers: application ones, and classic ones, whose lines lack the type in front.

    https 2018-07-02T22:23:00.186641Z app/my-lb/50dc6c495c0c9188 192.0.2.1:2817 10.0.0.1:80 0.086 0.048 0.037 200
    200 0 57 "GET https://www.example.com:443/path?query HTTP/1.1" "curl/7.46.0" ...

Each on one line. The target names its host always, which is left out here. Source:
https://docs.aws.amazon.com/elasticloadbalancing/latest/application/load-balancer-access-logs.html
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl.logs.server_log import (
    QUOTED,
    Requests,
    asked,
    is_no_visitor,
    part,
    readable,
    seconds_of_text,
)
from lockstep.etl.logs.values import Reasons
from lockstep.etl.reasons import BAD_TIME, NOT_ALB_LOG

# The balancer and the client; the target and three durations; the status; the target's status and two sizes.
_LINE = (
    r"^(?:[a-z]\S* )?(?P<stamp>\d\S*) \S+ (?P<client>\S+) \S+ \S+ \S+ \S+ (?P<status>\d{3}|-) \S+ \S+ \S+"
    rf' "(?P<request>{QUOTED})"(?: .*)?$'
)
_HOST = r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?]*"


def parse_alb(lines: pa.Array) -> Requests:
    """Parse lines (n,) binary."""
    reasons = Reasons(len(lines))
    found = pc.extract_regex(readable(lines, reasons), pattern=_LINE)
    reasons.add(np.asarray(pc.is_null(found), dtype=bool), NOT_ALB_LOG)
    time, timely = seconds_of_text(part(found, "stamp"))
    reasons.add(~timely, BAD_TIME)
    method, page, query = asked(part(found, "request"))
    status = pc.fill_null(part(found, "status"), "-")
    visitor = pc.fill_null(pc.replace_substring_regex(part(found, "client"), r"^\[?(.*?)\]?:\d+$", r"\1"), "")
    reasons.add(is_no_visitor(visitor), NOT_ALB_LOG)
    return Requests(
        visitor=visitor,
        method=method,
        page=pc.replace_substring_regex(page, _HOST, ""),
        query=query,
        time=time,
        status=np.asarray(pc.if_else(pc.equal(status, "-"), "0", status).cast(pa.int64())),
        reasons=reasons,
    )
