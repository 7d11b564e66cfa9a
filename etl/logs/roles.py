"""Which column of a log is the visitor, the time, the status, and what was asked for.

Decision record: docs/decisions/012-web-log.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.etl.choices import ROLES_ASKED, role_flag
from lockstep.etl.logs.formats import LOG_FORMATS, header_hint
from lockstep.storage.errors import ConfigError, DataError, require

# Two names of one fact: the first gives way to the others.
_GIVES_WAY: Mapping[str, tuple[str, ...]] = {
    "time_local": ("time_iso8601",),
    "msec": ("time_iso8601", "time_local"),
    "@timestamp": ("timestamp",),  # a log shipper's stamp next to the event's own
    "remote_host": ("remote_addr",),
    "source.address": ("source.ip",),
    "client_address": ("client_ip",),
    "client_addr": ("client_ip", "client_host"),
    "response": ("status",),
    "cs-uri": ("cs-uri-stem",),
}


class Names(NamedTuple):
    """The known names of one role: those that mean nothing else, and those that some logs use for something else, which
    count where no sure name is there. Case and marks do not matter: remoteAddr, Remote-Addr and remote_addr are equal.
    """

    sure: tuple[str, ...]
    loose: tuple[str, ...] = ()


NAMES: Mapping[str, Names] = {
    # `host` is the visitor in the Common Log Format, and the server in Nginx and in log shippers.
    "visitor": Names(
        ("visitor", "remote_addr", "remote_address", "remote_host", "remote_ip", "client_ip", "client_addr",
         "client_address", "client_host", "c-ip", "source.ip", "source.address", "src_ip", "user_ip", "visitor_ip",
         "true_client_ip"),
        ("host", "ip", "ip_address", "client", "remote", "address", "forwarded_for", "x_forwarded_for",
         "http_x_forwarded_for"),
    ),
    "date": Names(("date",)),
    "time": Names(("time_iso8601", "time_local", "msec"), ("time", "timestamp", "@timestamp", "datetime", "ts")),
    "status": Names(
        ("status_code", "response_code", "response_status", "http_status", "http_status_code",
         "http.response.status_code", "sc-status", "downstream_status", "edge_response_status"),
        ("status", "response"),
    ),
    "method": Names(
        ("request_method", "http_method", "http.request.method", "client_request_method", "cs-method", "verb"),
        ("method",),
    ),
    # `uri` and `path` may be what the server made of the request, or a log shipper's own file.
    "target": Names(
        ("request_uri", "request_url", "request_target", "original_url", "url.original", "client_request_uri",
         "cs-uri-stem", "cs-uri"),
        ("url", "uri", "path", "target", "request_path", "url.path"),
    ),
    "query": Names(("cs-uri-query",)),
    # The line in Nginx; the target alone in what Grok makes of a line.
    "request": Names(("request_line",), ("request",)),
    "referrer": Names(("cs(Referer)",)),
    "agent": Names(("cs(User-Agent)",)),
}  # fmt: skip


def plain(name: str) -> str:
    """A name in small letters and without marks."""
    return re.sub(r"[^a-z0-9@]", "", name.lower())


_TIERS = {role: tuple(frozenset(map(plain, tier)) for tier in names) for role, names in NAMES.items()}
_YIELDS = {plain(name): frozenset(map(plain, others)) for name, others in _GIVES_WAY.items()}


class _Found(NamedTuple):
    """The candidates for a role, and whether they have sure names (or a flag names them)."""

    names: tuple[str, ...] = ()
    sure: bool = False


def columns_of(
    there: Sequence[str], given: Mapping[str, str], url: str, *, nested: Sequence[str] = (), dated: bool = False
) -> dict[str, str]:
    """The column of each role among the columns `there` of the file `url`.

    `given` are columns by role that flags name, `nested` the paths of values inside objects, which are no columns.
    With `dated` the time of day and its date are two columns. Where a request line and a method are there, the method
    is that of lines whose request is the target alone. Raises ConfigError for a given column that is not there once,
    and for several candidates; DataError if a role has none.
    """
    for role, name in given.items():
        if there.count(name) != 1:
            raise _not_there(role, name, there, nested, url)
    free = [name for name in there if name not in given.values()]
    found = {role: _Found((given[role],), True) if role in given else _candidates(role, free) for role in NAMES}
    return {role: _one(role, found[role], nested, url) for role in _needed(found, given, dated, there, nested, url)}


def _candidates(role: str, there: Sequence[str]) -> _Found:
    for tier, sure in zip(_TIERS[role], (True, False), strict=True):
        known = [name for name in there if plain(name) in tier]
        forms = {plain(name) for name in known}
        left = tuple(name for name in known if not forms & _YIELDS.get(plain(name), frozenset()))
        if left:
            return _Found(left, sure)
    return _Found()


def _needed(
    found: Mapping[str, _Found],
    given: Mapping[str, str],
    dated: bool,
    there: Sequence[str],
    nested: Sequence[str],
    url: str,
) -> list[str]:
    """The roles to read. Raises DataError for those without a candidate."""
    apart = bool(found["method"].names and found["target"].names)
    whole = bool(found["request"].names) and not (apart and found["target"].sure)
    if "request" in given or "target" in given:
        whole = "target" not in given
    asked = ["request", *(["method"] if found["method"].names else [])] if whole else ["method", "target"]
    asked += ["query"] if found["query"].names and not whole else []
    needed = ["visitor", "time", "status", *asked]
    if dated:
        # A column of another name holds date and time.
        needed += ["date"] if "time" in map(plain, found["time"].names) else []
        needed += [role for role in ("referrer", "agent") if found[role].names]
    missing = [role for role in needed if not found[role].names]
    if missing:
        raise _missing(missing, there, nested, url)
    idle = [role_flag(role) for role in given if role not in needed]
    require(not idle, ", ".join(idle), f"the columns {', '.join(found['request'].names)}", "only with a target column")
    return needed


def _one(role: str, found: _Found, nested: Sequence[str], url: str) -> str:
    """The one candidate for a role."""
    inside = [] if found.sure else [path for path in nested if plain(path) in _TIERS[role][0]]
    rivals = [*found.names, *inside]
    if len(rivals) == 1:
        return rivals[0]
    apart = role in ROLES_ASKED and len(set(rivals)) == len(rivals)
    way = (
        f"Name the one to use: {role_flag(role)} COLUMN."
        if apart
        else "Give each column of the file a name of its own."
    )
    if inside:
        way += " Names do not reach into objects: write such a value into a column of its own first."
    raise ConfigError(
        f"input {url} has {len(rivals)} columns that may be the {role}",
        got=", ".join(rivals)[:500],
        allowed=f"one column for the {role}",
        next_step=way,
    )


def _not_there(role: str, name: str, there: Sequence[str], nested: Sequence[str], url: str) -> ConfigError:
    inside = " Names do not reach into objects." if name in nested else ""
    count = there.count(name)
    return ConfigError(
        f"input {url} does not have the column of {role_flag(role)} once",
        got=f"{name}, {f'{count} times' if count else 'no such column'}",
        allowed=f"its columns: {', '.join(there)[:500]}",
        next_step=f"Correct {role_flag(role)}.{inside}",
    )


def _missing(missing: Sequence[str], there: Sequence[str], nested: Sequence[str], url: str) -> DataError:
    known = "; ".join(f"{role}: {', '.join([*NAMES[role].sure, *NAMES[role].loose])}" for role in missing)
    directed = (
        form.name for form in LOG_FORMATS.values() if form.directive and "".join(there[:1]).startswith(form.directive)
    )
    other = next(directed, None)
    hint = header_hint(there) if other is None else f"The file looks like {other}: correct --log-format."
    flags = ", ".join(role_flag(role) for role in missing if role in ROLES_ASKED)
    ways = ["names do not reach into objects, so write such values into columns of their own first"] if nested else []
    ways += [f"name columns by {flags}"] if flags else []
    ways += ["give --schema for records of another kind", "give --columns where the file has no header"]
    way = f"{ways[0][0].upper()}{'; '.join(ways)[1:]}."
    inside = f"; inside objects {', '.join(nested)}" if nested else ""
    return DataError(
        f"input {url} holds no web requests: no column for {', '.join(missing)}",
        got=f"columns {', '.join(there)}"[:500] + inside[:500],
        allowed=known,
        next_step=hint or way,
    )


def check_alike(urls: Sequence[str], columns: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The columns of the roles in all files. Raises DataError naming two files that have different ones.

    Referrer and agent count where every file has both.
    """
    both = all({"referrer", "agent"} <= set(found) for found in columns)
    idle = () if both else ("referrer", "agent")
    left = [{role: name for role, name in found.items() if role not in idle} for found in columns]
    for url, found in zip(urls, left, strict=True):
        if found != left[0]:
            raise DataError(
                f"input {url} has other columns for its roles than {urls[0]}",
                got=said(found),
                allowed=said(left[0]),
                next_step="Name columns that all files have, by flags such as --visitor-column, or give fewer files.",
            )
    return left[0]


def said(columns: Mapping[str, str]) -> str:
    """The columns of roles in words."""
    return ", ".join(f"{role} {columns[role]}" for role in NAMES if role in columns)
