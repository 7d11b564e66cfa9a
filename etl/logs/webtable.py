"""Web requests in tables: the columns of a web log by the names that servers and people give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.logs.fields import DELIMITERS
from etl.logs.server_log import BAD_TIME, Requests, asked, target_parts
from etl.logs.stamps import seconds_of_text
from etl.logs.table_lines import Column, Form, read_table
from etl.logs.values import Reasons, bad_value
from lockstep.storage.errors import DataError

# In order of preference; letters' case says nothing.
NAMES: Mapping[str, tuple[str, ...]] = {
    "visitor": ("visitor", "host", "remote_addr", "remote_host", "client_ip", "clientip", "ip"),
    "time": ("time", "timestamp", "@timestamp", "time_iso8601", "time_local", "msec"),
    "method": ("method", "request_method", "verb"),
    "target": ("url", "uri", "request_uri", "path", "target"),
    "request": ("request", "request_line"),
    "status": ("status", "response", "status_code"),
}
_NEEDED = (("visitor",), ("time",), ("status",), ("method", "target"))
_NUMBER, _WHOLE = pa.decimal128(38, 12), pa.decimal128(18, 0)  # for these Arrow takes JSON's numbers and "200" alike


def roles(names: Sequence[str], url: str) -> dict[str, str]:
    """Which column is the visitor, the time, the status, and the method and target or the whole request line.

    Raises DataError naming the file `url` where one is missing.
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
        told = "; ".join(f"{role}: {', '.join(NAMES[role])}" for role in missing)
        other = next((kind for kind, mark in DELIMITERS.items() if len(names) == 1 and mark in names[0]), None)
        way = "Give --schema for records of another kind, or --columns where the file has no header."
        raise DataError(
            f"input {url} holds no web requests: no column for {', '.join(missing)}",
            got=f"columns {', '.join(names)[:500]}",
            allowed=told,
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
    # JSON has times as numbers and as strings, and Arrow reads a number out of a string too, by a grammar of its own.
    # So each line that may hold a string is read as text first, whatever its neighbours hold.
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
    """Times as text, if they were numbers as whole seconds."""
    time = found["time"]
    whole = pc.floor(time).cast(pa.decimal128(38, 0)).cast(pa.string()) if pa.types.is_decimal(time.type) else time
    return {**found, "time": whole}


def _text_time(lines: pa.Array, name: str) -> pa.Array:
    """Where the field may be a string: where it seems one, or a name may be written with escapes."""
    escaped = "".join(f"\\x{{{ord(letter):x}}}" for letter in name)
    return pc.match_substring_regex(lines, rf'"{escaped}"[ \t\r]*:[ \t\r]*"|\\u')
