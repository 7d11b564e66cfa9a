"""Requests for pages out of a web server's log, whatever its format.

Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.etl import columns as c
from lockstep.etl.logs import w3c
from lockstep.etl.logs.formats import Form, read_table
from lockstep.etl.logs.pages import ASSET_SUFFIXES, Suffixes, is_page
from lockstep.etl.logs.parse import NO_TIME, Found
from lockstep.etl.logs.server_log import (
    Requests,
    asked,
    first_address,
    is_no_visitor,
    readable,
    seconds_of_text,
    target_parts,
)
from lockstep.etl.logs.values import Column, Reasons, bad_value, missing_value
from lockstep.etl.reasons import BAD_TIME, CENSORED, NOT_A_PAGE
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ID_COLUMNS = ("visitor", "page", "time", "query")
ID_SCHEMA = pa.schema([(name, pa.int64() if name == "time" else pa.string()) for name in ID_COLUMNS])
COMBINED = ("referrer", "agent")  # the columns that the combined format has, and some W3C logs
LABEL = "stays"
LABEL_TYPES = ("boolean",)
LABEL_ALLOWED = "a boolean SQL expression over visitor, page, query, time and log_end; NULL means censored"
# Requests of one second are in the order of the log. Every window ends at the row itself, so it sees nothing later.
_BY_TIME = "PARTITION BY visitor ORDER BY time, _part, _source, _position"
_PAST = f"({_BY_TIME} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
_ORDER = f"({_BY_TIME})"
_SAME = "(PARTITION BY visitor, page, time, query ORDER BY _part, _source, _position)"
# The columns of lockstep.etl.logs.past.carried_schema, for a request that is read from the log.
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
_NUMBER, _WHOLE = pa.decimal128(38, 12), pa.decimal128(18, 0)  # which Arrow reads from numbers and from strings of JSON
# Where fields may be absent: `-` for one of the first three is no page; of the last two a section may have no column.
_MAY_BE_ABSENT = ("status", "method", "target", "query", *COMBINED)


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

    `past` are the requests that a log's first `part` datasets carry (lockstep.etl.logs.past). With `hold_s`, how long
    the label waits for later requests, the rows have the column lockstep.etl.columns.CARRIED.
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


def read_requests(
    lines: pa.Array, form: Form, names: Sequence[str], columns: Mapping[str, str], drops: Reasons
) -> Requests:
    """The requests of lines (n,) binary whose fields have names; adds to `drops` for empty lines.

    `columns` are the columns of the roles, `names` the fields of a line in order (but in JSON). A time is a number of
    seconds since 1970, ISO 8601 or the stamp of the Common Log Format.
    """
    reasons = Reasons(len(lines))
    found = _read(lines, form, names, columns, reasons, drops)
    visitor = first_address(pc.fill_null(found["visitor"], ""))
    there = reasons.good & drops.good
    reasons.add(there & is_no_visitor(pc.utf8_trim_whitespace(visitor)), missing_value(columns["visitor"]))
    time, timely = seconds_of_text(w3c.moments(found["date"], found["time"]) if "date" in found else found["time"])
    reasons.add(there & ~timely, BAD_TIME)
    method, page, query = _asked(found)
    said = {}
    if set(COMBINED) <= set(columns):
        tabs = w3c.has_tabs(readable(lines, Reasons(len(lines))))
        said = {name: w3c.said_in(found[name], tabs, agent=name == "agent") for name in COMBINED}
    return Requests(
        visitor=visitor,
        method=pc.fill_null(method, ""),
        page=page,
        query=query,
        time=time,
        status=np.asarray(pc.fill_null(found["status"].cast(pa.int64()), 0)),
        reasons=reasons,
        **said,
    )


def _asked(found: Mapping[str, pa.Array]) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Methods, pages and queries of the columns by their roles."""
    if "request" not in found:
        page, query = target_parts(found["target"])
        if "query" in found:
            query = pc.if_else(pc.equal(query, ""), pc.fill_null(found["query"], ""), query)
        return found["method"], page, query
    method, page, query = asked(found["request"])
    if "method" not in found:
        return method, page, query
    # Grok calls the target alone `request`, and the method is another column.
    alone = pc.fill_null(pc.match_substring_regex(found["request"], "^(?:/|[A-Za-z][A-Za-z0-9+.-]*://)"), False)
    pages, queries = target_parts(found["request"])
    return (
        pc.if_else(alone, found["method"], method),
        pc.if_else(alone, pages, page),
        pc.if_else(alone, queries, query),
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
    absent = _MAY_BE_ABSENT if form.format.absent is not None else ("method",) if "request" in columns else ()

    def read(some: pa.Array, time: pa.DataType, why: Reasons, left_out: Reasons) -> dict[str, pa.Array]:
        kinds = {"time": time, "status": _WHOLE if form.format.keyed else pa.int64()}
        wanted = [
            Column(name, kinds.get(role, pa.string()), nullable=role in absent, may_be_empty=role in COMBINED)
            for role, name in columns.items()
        ]
        table = read_table(some, form, names, wanted, why, left_out)
        return {role: table[name] for role, name in columns.items()}

    if not form.format.keyed:
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
    """Keeps the requests for pages. `columns` are the columns of the roles in a format whose fields have names, and
    `assets` the suffixes that no page has.
    """

    form: Form
    columns: Mapping[str, str] = field(default_factory=dict)
    assets: tuple[str, ...] = ASSET_SUFFIXES

    @property
    def combined(self) -> bool:
        """Whether requests name their referrer and user agent."""
        return self.form.format.referrers or set(COMBINED) <= set(self.columns)

    @property
    def schema(self) -> pa.Schema:
        """The columns of a request."""
        texts = [(name, pa.string()) for name in texts_of(self.combined)]
        return pa.schema([*texts, ("time", pa.int64())])

    def parse(self, lines: pa.Array, names: Sequence[str]) -> Found:
        """Parse lines (n,) binary; `names` are the fields of a line in order, where they have names."""
        drops = Reasons(len(lines))
        requests = self._requests(lines, names, drops)
        good = requests.reasons.good & drops.good
        last = int(requests.time[good].max()) if good.any() else NO_TIME
        suffixes = Suffixes.of(requests.page)
        page = is_page(requests.method, requests.page, suffixes.among(self.assets), requests.status)
        drops.add(good & ~page, NOT_A_PAGE)
        columns = {name: getattr(requests, name) for name in self.schema.names if name != "time"}
        columns["time"] = pa.array(requests.time)
        kept = good & drops.good
        first = int(requests.time[kept].min()) if kept.any() else None
        return Found(columns, requests.reasons, drops, last, first, suffixes.counts(kept))

    def _requests(self, lines: pa.Array, names: Sequence[str], drops: Reasons) -> Requests:
        parse = self.form.format.parse
        return read_requests(lines, self.form, names, self.columns, drops) if parse is None else parse(lines)
