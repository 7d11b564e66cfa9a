"""The rows of a web log by plain Python and pandas: what one job over all files must write, and so must N appends."""

from __future__ import annotations

import gzip
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

WINDOW_S = 1800
FEATURES = ("prev_page", "hour", "requests_so_far", "seconds_since_prev", "mean_gap_s")
_LINE = re.compile(r'^(\S+) .*?\[([^\]]+)\] "(.*)" (\d{3}) \S+$', re.DOTALL)
_ASSET = re.compile(
    r"\.(gif|jpg|jpeg|png|xbm|bmp|ico|svg|css|js|mpg|mpeg|avi|mov|wav|au|mp3|mp4|zip|gz|z|tar|exe|woff|woff2)$", re.I
)


class Request(NamedTuple):
    """A request for a page."""

    visitor: str
    page: str
    query: str
    time: int


def pages_of(lines: Sequence[bytes]) -> tuple[list[Request], int]:
    """The requests for pages in lines of the Common Log Format, in order, and the log's last time."""
    found, last = [], 0
    for line in lines:
        match = _LINE.match(line.decode("utf-8").rstrip("\n"))
        assert match is not None, line
        visitor, stamp, asked, status = match.groups()
        time = int(datetime.strptime(stamp, "%d/%b/%Y:%H:%M:%S %z").timestamp())
        last = max(last, time)
        method, _, rest = asked.partition(" ")
        target = rest.rpartition(" HTTP/")[0] if " HTTP/" in rest else rest
        page, _, query = target.strip(" ").partition("?")  # some are followed by more than one blank
        good = method == "GET" and page and (status == "304" or status[0] == "2")
        if good and not _ASSET.search(page):
            found.append(Request(visitor, page, query, time))
    return found, last


def rows_of(
    requests: Sequence[Request],
    log_end: int,
    window_s: int = WINDOW_S,
    judge: Callable[[Request, bool], bool | None] = lambda _, stays: stays,
) -> pd.DataFrame:
    """A row for each request whose window the log covers, with label, features and which of its equals it is.

    `judge` makes the label of whether another request comes in the window; None leaves the request out.
    """
    visits: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        visits[request.visitor].append(request)
    rows = []
    for visitor, own in visits.items():
        own.sort(key=lambda one: one.time)  # stable: requests of one second stay in the order of the log
        times = [one.time for one in own]
        seen: Counter[Request] = Counter()
        for number, one in enumerate(own):
            before = own[number - 1] if number else None
            row = {
                "visitor": visitor,
                "page": one.page,
                "query": one.query,
                "time": one.time,
                "occurrence": seen[one],
                "stays": judge(one, bisect_right(times, one.time + window_s) > bisect_right(times, one.time)),
                "prev_page": None if before is None else before.page,
                "hour": one.time % 86_400 // 3600,
                "requests_so_far": number,
                "seconds_since_prev": None if before is None else one.time - before.time,
                "mean_gap_s": (one.time - times[0]) // number if number else None,
            }
            seen[one] += 1
            if one.time + window_s <= log_end and row["stays"] is not None:
                rows.append(row)
    found = pd.DataFrame(rows, columns=["visitor", "page", "query", "time", "occurrence", "stays", *FEATURES])
    return found.astype({"seconds_since_prev": "Int64", "mean_gap_s": "Int64", "stays": bool})


def lines_of(path: Path) -> list[bytes]:
    """The lines of a gzip file."""
    with gzip.open(path) as file:
        return file.read().splitlines(keepends=True)
