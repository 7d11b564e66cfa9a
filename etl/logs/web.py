"""Requests for pages out of a web server's log, whatever its format.

Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl import columns as c
from etl.logs import server_log
from etl.logs.fields import DELIMITERS, TABLE_FORMATS, Column, Form, read_table
from etl.logs.parse import NO_TIME, Found
from etl.logs.server_log import BAD_TIME, Requests, asked, seconds_of_text, target_parts
from etl.logs.values import Reasons, bad_value
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Files that a browser fetches by itself to show a page, and downloads. Text, HTML, scripts on the server (.pl, no
# suffix) and mistyped suffixes are pages: a visitor asked for them.
ASSET_SUFFIXES = (
    "gif", "jpg", "jpeg", "png", "xbm", "bmp", "ico", "svg", "css", "js",
    "mpg", "mpeg", "avi", "mov", "wav", "au", "mp3", "mp4", "zip", "gz", "z", "tar", "exe", "woff", "woff2",
)  # fmt: skip
_ASSET = rf"(?i)\.(?:{'|'.join(ASSET_SUFFIXES)})$"
NOT_A_PAGE = "not_a_page"
CENSORED = "censored"
ID_COLUMNS = ("visitor", "page", "time", "query")
ID_SCHEMA = pa.schema([(name, pa.int64() if name == "time" else pa.string()) for name in ID_COLUMNS])
COMBINED = ("referrer", "agent")  # the columns that only the combined format has
LABEL = "stays"
LABEL_TYPES = ("boolean",)
LABEL_ALLOWED = "a boolean SQL expression over visitor, page, query, time and log_end; NULL means censored"


def is_page(method: pa.Array, page: pa.Array, status: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which requests are for a page: GET, answered with 2xx or 304, no asset suffix. (n,) bool."""
    got = np.asarray(pc.equal(method, "GET"), dtype=bool)
    asset = np.asarray(pc.match_substring_regex(page, _ASSET), dtype=bool)
    named = np.asarray(pc.not_equal(page, ""), dtype=bool)
    return np.asarray(got & named & ~asset & (((status >= 200) & (status < 300)) | (status == 304)))


def _vocabulary(file: str, max_size: int, min_count: int) -> dict[str, object]:
    return {"kind": "vocabulary", "file": file, "max_size": max_size, "min_count": min_count, "oov_buckets": 1}


def _buckets(*boundaries: int) -> dict[str, object]:
    return {"kind": "bucketise", "boundaries": list(boundaries)}


_SECONDS = _buckets(1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 900, 1800, 3600, 7200, 14400)


def _tokens(name: str, max_size: int) -> Field:
    return Field(name=name, dtype="string", shape=(None,), encoding=_vocabulary(f"{name}.json", max_size, 5))


def label_schema(combined: bool) -> pa.Schema:
    """The columns that a label's expression may use; `combined` as for `schema`."""
    texts = [(name, pa.string()) for name in texts_of(combined)]
    return pa.schema([*texts, ("time", pa.int64()), ("log_end", pa.int64())])


def schema(combined: bool = False) -> Schema:
    """The fields of a web log's dataset; `combined`: the log names referrer and user agent.

    The visitor is not one of them: a model should not learn host names.
    """
    more = tuple(_tokens(f"{name}_tokens", 500) for name in COMBINED) if combined else ()
    return Schema(
        (
            sample_id_field(),
            Field(name=LABEL, dtype="bool", kind="label"),
            Field(name="page", dtype="string", encoding=_vocabulary("page.json", 2000, 3)),
            _tokens("page_tokens", 1000),
            _tokens("query_tokens", 500),
            Field(name="prev_page", dtype="string", nullable=True, encoding=_vocabulary("prev_page.json", 1000, 5)),
            Field(name="hour", dtype="int64", encoding=_buckets(*range(1, 24))),
            Field(
                name="requests_so_far", dtype="int64", encoding=_buckets(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
            ),
            Field(name="seconds_since_prev", dtype="int64", nullable=True, encoding=_SECONDS),
            Field(name="mean_gap_s", dtype="int64", nullable=True, encoding=_SECONDS),
            *more,
        )
    )


# Requests of one second are in the order of the log. Every window ends at the row itself, so it sees nothing later.
_BY_TIME = "PARTITION BY visitor ORDER BY time, _part, _source, _position"
_PAST = f"({_BY_TIME} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
_ORDER = f"({_BY_TIME})"
_SAME = "(PARTITION BY visitor, page, time, query ORDER BY _part, _source, _position)"
# The columns of etl.logs.past.carried_schema, for a request that is read from the log.
_NEW = ("{0} AS _part", "1L AS _requests", "time AS _since", "CAST(NULL AS BOOLEAN) AS _stays", "true AS _open")
_WORDS = "filter(split(lower({0}), '[^a-z0-9]+'), w -> length(w) BETWEEN 1 AND 40)"
_PARTS = "filter(slice(split(lower(page), '/'), 1, 16), p -> p <> '')"
_WINDOWS = (
    "*",
    f"lag(page) OVER {_ORDER} AS prev_page",
    f"sum(_requests) OVER {_PAST} - 1 AS requests_so_far",
    f"time - lag(time) OVER {_ORDER} AS seconds_since_prev",
    f"time - min(_since) OVER {_PAST} AS _seconds_so_far",
    f"CAST(row_number() OVER {_SAME} - 1 AS BIGINT) AS _occurrence",
)
_COLUMNS = (
    "page",
    # "/a/", "/a/b/", ... for each leading part of the path, and the words of the whole path
    f"array_distinct(slice(concat(transform({_PARTS},"
    f" (p, i) -> concat('/', array_join(slice({_PARTS}, 1, i + 1), '/'), '/')),"
    f" {_WORDS.format('page')}), 1, 64)) AS page_tokens",
    f"array_distinct(slice({_WORDS.format('query')}, 1, 64)) AS query_tokens",
    "prev_page",
    "CAST(pmod(time, 86400) DIV 3600 AS BIGINT) AS hour",
    "requests_so_far",
    "seconds_since_prev",
    "IF(requests_so_far = 0, NULL, _seconds_so_far DIV requests_so_far) AS mean_gap_s",
    f"{LABEL}",
    "visitor",
    "time",
    "query",
    "_source",
    "_position",
    "_occurrence",
    f"CASE WHEN NOT _open THEN '{c.PAST}' WHEN {LABEL} IS NULL THEN '{CENSORED}' END AS {c.DROPPED}",
)
# Whole: the requests that are open at log_end, and for a label that waits for nothing those of the last second, whose
# like may follow. Of the earlier ones the last of each visitor. {0}: the texts, {1}: the time after which requests are
# whole, {2}: that after which they are open.
_NEXT = f"lead(time) OVER {_ORDER} AS _next"
_CARRIED = (
    "IF(time > {1} OR coalesce(_next > {1}, true), named_struct({0}, 'time', time, 'part', _part, 'source', _source,"
    " 'position', _position, 'requests', IF(time > {1}, 1L, requests_so_far + 1),"
    f" 'since', IF(time > {{1}}, time, time - _seconds_so_far), 'stays', {LABEL}, 'open', time > {{2}}), NULL)"
    f" AS {c.CARRIED}"
)


def texts_of(combined: bool) -> tuple[str, ...]:
    """The columns of text that a request has; `combined` as for `schema`."""
    return ("visitor", "page", "query", *(COMBINED if combined else ()))


def rows_of(
    pages: DataFrame,
    label: str,
    log_end: int,
    combined: bool = False,
    *,
    past: DataFrame | None = None,
    part: int = 0,
    hold_s: int | None = None,
) -> DataFrame:
    """Page requests (visitor, page, query, time, _source, _position; with `combined` referrer and agent) with label,
    features and the writer's columns.

    `past` are the requests that a log's first `part` datasets carry (etl.logs.past). With `hold_s`, how long the label
    waits for later requests, the rows have the column etl.columns.CARRIED.
    """
    texts = texts_of(combined)
    seen = pages.select(*texts, "time", "_source", "_position").selectExpr("*", *(one.format(part) for one in _NEW))
    if past is not None:
        others = [f"{name} AS _{name}" for name in past.columns if name not in (*texts, "time")]
        seen = seen.unionByName(past.selectExpr(*texts, "time", *others))
    labelled = seen.selectExpr("*", f"{log_end}L AS log_end")
    labelled = labelled.selectExpr("*", f"IF(_open, ({label}), _stays) AS {LABEL}")
    windows, columns = list(_WINDOWS), list(_COLUMNS)
    if past is not None:
        columns[columns.index("_source")] = f"IF(_part = {part}, _source, -1) AS _source"
    columns += [f"array_distinct(slice({_WORDS.format(name)}, 1, 64)) AS {name}_tokens" for name in texts[3:]]
    if hold_s is not None:
        names = ", ".join(f"'{name}', {name}" for name in texts)
        windows.append(_NEXT)
        columns.append(_CARRIED.format(names, log_end - max(hold_s, 1), log_end - hold_s))
    rows = labelled.selectExpr(*windows).selectExpr(*columns)
    return rows if past is None else rows.where(f"NOT ({c.DROPPED} <=> '{c.PAST}' AND {c.CARRIED} IS NULL)")


# In order of preference; upper and lower case are equal.
NAMES: Mapping[str, tuple[str, ...]] = {
    "visitor": ("visitor", "host", "remote_addr", "remote_host", "client_ip", "clientip", "ip"),
    "time": ("time", "timestamp", "@timestamp", "time_iso8601", "time_local", "msec"),
    "method": ("method", "request_method", "verb"),
    "target": ("url", "uri", "request_uri", "path", "target"),
    "request": ("request", "request_line"),
    "status": ("status", "response", "status_code"),
}
_NEEDED = (("visitor",), ("time",), ("status",), ("method", "target"))
_NUMBER, _WHOLE = pa.decimal128(38, 12), pa.decimal128(18, 0)  # which Arrow reads from numbers and from strings of JSON


def roles(names: Sequence[str], url: str) -> dict[str, str]:
    """Which column is the visitor, the time, the status, and the method and target or the whole request line.

    Raises DataError naming the file `url` if one is missing.
    """
    lower = {name.lower(): name for name in reversed(names)}
    found = {
        role: next(lower[name] for name in known if name in lower)
        for role, known in NAMES.items()
        if any(name in lower for name in known)
    }
    whole = {"request"} <= set(found) and not {"method", "target"} <= set(found)
    needed = [*_NEEDED[:3], ("request",) if whole else _NEEDED[3]]
    missing = [role for group in needed for role in group if role not in found]
    if missing:
        known = "; ".join(f"{role}: {', '.join(NAMES[role])}" for role in missing)
        other = next((kind for kind, mark in DELIMITERS.items() if len(names) == 1 and mark in names[0]), None)
        way = "Give --schema for records of another kind, or --columns where the file has no header."
        raise DataError(
            f"input {url} holds no web requests: no column for {', '.join(missing)}",
            got=f"columns {', '.join(names)[:500]}",
            allowed=known,
            next_step=way if other is None else f"The file looks like {other}: correct --log-format.",
        )
    return {role: found[role] for group in needed for role in group}


def read_requests(lines: pa.Array, form: Form, names: Sequence[str], drops: Reasons) -> Requests:
    """The requests of lines (n,) binary in TSV, CSV or JSON; adds to `drops` for empty lines.

    A time is a number of seconds since 1970, ISO 8601 or the stamp of the Common Log Format.
    """
    columns = roles(names, "")
    reasons = Reasons(len(lines))
    found = _read(lines, form, names, columns, reasons, drops)
    there = reasons.good & drops.good
    time, timely = seconds_of_text(found["time"])
    reasons.add(there & ~timely, BAD_TIME)
    if "request" in found:
        method, page, query = asked(found["request"])
    else:
        method, (page, query) = found["method"], target_parts(found["target"])
    return Requests(
        visitor=pc.fill_null(found["visitor"], ""),
        method=pc.fill_null(method, ""),
        page=page,
        query=query,
        time=time,
        status=np.asarray(pc.fill_null(found["status"].cast(pa.int64()), 0)),
        reasons=reasons,
    )


def _read(
    lines: pa.Array,
    form: Form,
    names: Sequence[str],
    columns: Mapping[str, str],
    reasons: Reasons,
    drops: Reasons,
) -> dict[str, pa.Array]:
    """The columns by their roles; the time as text."""

    def read(some: pa.Array, time: pa.DataType, why: Reasons, left_out: Reasons) -> dict[str, pa.Array]:
        kinds = {"time": time, "status": _WHOLE if form.log_format == "json" else pa.int64()}
        wanted = [Column(name, kinds.get(role, pa.string()), may_be_empty=False) for role, name in columns.items()]
        table = read_table(some, form, names, wanted, why, left_out)
        return {role: table[name] for role, name in columns.items()}

    if form.log_format != "json":
        return read(lines, pa.string(), reasons, drops)
    # JSON has times as numbers and as strings, and Arrow also reads numbers from strings, with its own grammar. So each
    # line that may have a string is read as text first, independent of its neighbours.
    text = np.asarray(_text_time(lines, columns["time"]), dtype=bool)
    parts, places = [], []
    for where, kind in ((text, pa.string()), (~text, _NUMBER)):
        some, why, left_out = lines.filter(pa.array(where)), Reasons(int(where.sum())), Reasons(int(where.sum()))
        part = _in_seconds(read(some, kind, why, left_out))
        again = why.where(bad_value(columns["time"])) if kind == pa.string() else np.zeros(len(some), dtype=bool)
        if again.any():
            second = Reasons(int(again.sum()))
            more = _in_seconds(read(some.filter(pa.array(again)), _NUMBER, second, Reasons(len(second))))
            part = {role: pc.replace_with_mask(part[role], pa.array(again), more[role]) for role in part}
            why.replace(second, again)
        parts.append(part)
        places.append(np.flatnonzero(where))
        reasons.take_from(why, places[-1])
        drops.take_from(left_out, places[-1])
    back = pa.array(np.argsort(np.concatenate(places)))
    return {role: pa.concat_arrays([part[role] for part in parts]).take(back) for role in columns}


def _in_seconds(found: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """Times as text; numbers become whole seconds."""
    time = found["time"]
    whole = pc.floor(time).cast(pa.decimal128(38, 0)).cast(pa.string()) if pa.types.is_decimal(time.type) else time
    return {**found, "time": whole}


def _text_time(lines: pa.Array, name: str) -> pa.Array:
    """The lines whose field may be a string: it looks like one, or a name may be written with escapes."""
    escaped = "".join(f"\\x{{{ord(letter):x}}}" for letter in name)
    return pc.match_substring_regex(lines, rf'"{escaped}"[ \t\r]*:[ \t\r]*"|\\u')


@dataclass(frozen=True, slots=True)
class WebLines:
    """Keeps the requests for pages; TSV, CSV and JSON have the columns of NAMES."""

    form: Form

    @property
    def schema(self) -> pa.Schema:
        """The columns of a request."""
        texts = [(name, pa.string()) for name in texts_of(self.form.log_format == "combined")]
        return pa.schema([*texts, ("time", pa.int64())])

    def parse(self, lines: pa.Array, names: Sequence[str]) -> Found:
        """Parse lines (n,) binary; `names` are the fields of a line of a table."""
        drops = Reasons(len(lines))
        requests = self._requests(lines, names, drops)
        good = requests.reasons.good & drops.good
        last = int(requests.time[good].max()) if good.any() else NO_TIME
        drops.add(good & ~is_page(requests.method, requests.page, requests.status), NOT_A_PAGE)
        columns = {name: getattr(requests, name) for name in self.schema.names if name != "time"}
        columns["time"] = pa.array(requests.time)
        kept = requests.time[good & drops.good]
        return Found(columns, requests.reasons, drops, last, int(kept.min()) if len(kept) else None)

    def _requests(self, lines: pa.Array, names: Sequence[str], drops: Reasons) -> Requests:
        if self.form.log_format in TABLE_FORMATS:
            return read_requests(lines, self.form, names, drops)
        combined = self.form.log_format == "combined"
        return server_log.parse_combined(lines) if combined else server_log.parse_common(lines)
