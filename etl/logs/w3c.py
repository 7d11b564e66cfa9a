"""The W3C extended log format, as IIS and CloudFront write it.

    #Fields: date time cs-method cs-uri-stem cs-uri-query c-ip cs(User-Agent) sc-status
    2024-05-03 08:07:57 GET /shop/item id=3 192.0.2.13 Mozilla/5.0+(X11) 200

Lines with `#` are directives. A `#Fields` line names the fields of the lines after it, up to the next one: a server
writes one at each start. Times are in UTC, `-` means absent. Between fields is a blank (IIS; blanks inside fields
become `+`, other servers put such fields in quotes) or a tab (CloudFront; fields are encoded with `%`).
Source: https://www.w3.org/TR/WD-logfile.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl.logs.fields import read_fields
from lockstep.etl.logs.values import Column, Reasons
from lockstep.storage.errors import DataError

_FIELDS = re.compile(rb"#\s*fields\s*:(.*)", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"]|"")*)"(?: |$)|([^ ]*)(?: |$)')


def names_in(lines: Sequence[bytes], url: str) -> tuple[str, ...]:
    """The fields that the directives before the first record name. Raises DataError if none does."""
    names: tuple[str, ...] = ()
    for line in lines:
        if line.strip() and not line.startswith(b"#"):
            break
        names = _names(line) or names
    if not names:
        raise DataError(
            f"input {url} does not name its fields before its first record",
            got=repr(lines[0][:80]) if lines else "no line",
            allowed="a line such as `#Fields: date time c-ip cs-method cs-uri-stem sc-status`",
            next_step="Check --log-format; put the server's line `#Fields: ...` at the file's start.",
        )
    return names


def sections(lines: pa.Array, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], NDArray[np.int64]]]:
    """The records among lines (n,) binary, cut where a directive changes their fields: names, and places (m,).

    `names` are those of the first lines; the last ones, perhaps without a record, are those after the last line.
    """
    directive = np.asarray(pc.starts_with(lines, b"#"), dtype=bool)
    start = 0
    for place in np.flatnonzero(directive).tolist():
        named = _names(lines[place].as_py())
        if named and named != names:
            yield names, start + np.flatnonzero(~directive[start:place])
            names, start = named, place
    yield names, start + np.flatnonzero(~directive[start:])


def _names(line: bytes) -> tuple[str, ...]:
    found = _FIELDS.match(line)
    return tuple(found[1].decode("utf-8", "replace").split()) if found else ()


def read_w3c(
    text: pa.Array, names: Sequence[str], columns: Sequence[Column], null_texts: Sequence[str], reasons: Reasons
) -> tuple[dict[str, pa.Array], NDArray[np.int64]]:
    """Columns of the records of a W3C log, as lockstep.etl.logs.formats.ReadColumns says."""
    return read_fields(tabbed(text), names, columns, null_texts, reasons, delimiter="\t")


def looks_like_w3c(lines: Sequence[bytes]) -> bool:
    """Whether there is a directive with which files begin."""
    return any(line.startswith((b"#Fields:", b"#Version:", b"#Software:")) for line in lines)


def tabbed(lines: pa.Array) -> pa.Array:
    """Lines (n,) of strings with tabs between their fields, those in quotes without them."""
    blanks = pc.invert(has_tabs(lines))
    quoted = pc.and_(blanks, pc.match_substring_regex(lines, '(?:^| )"'))
    lines = pc.if_else(blanks, pc.replace_substring(lines, " ", "\t"), lines)
    if not pc.any(quoted).as_py():
        return lines
    apart = [_apart(line.replace("\t", " ")) for line in lines.filter(quoted).to_pylist()]
    return pc.replace_with_mask(lines, quoted, pa.array(apart, pa.string()))


def _apart(line: str) -> str:
    fields = ((match[1] or "").replace('""', '"') if match[1] is not None else match[2] for match in _parts(line))
    return "\t".join(fields)


def _parts(line: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(line):
        match = _QUOTED.match(line, place)
        assert match is not None
        yield match
        place = match.end()


def has_tabs(lines: pa.Array) -> pa.Array:
    """Which lines (n,) have tabs between their fields: (n,) bool."""
    return pc.match_substring(lines, "\t")


def said_in(texts: pa.Array, tabs: pa.Array, *, agent: bool) -> pa.Array:
    """Referrers or agents (n,) as clients sent them, "" where absent: decoded in lines with `tabs` (n,); in others a
    `+` of an agent was a blank.
    """
    texts = pc.fill_null(texts, "")
    coded = pc.dictionary_encode(texts)
    decoded = pa.array([_decoded(text, agent) for text in coded.dictionary.to_pylist()], pa.string())
    plain = pc.replace_substring(texts, "+", " ") if agent else texts
    return pc.if_else(tabs, decoded.take(coded.indices), plain)


def _decoded(text: str, agent: bool) -> str:
    once = unquote(text)
    return unquote(once) if agent and "%20" in once else once  # CloudFront encoded agents twice for years


def moments(dates: pa.Array, times: pa.Array) -> pa.Array:
    """Dates and times of day, each (n,), as one text in ISO 8601."""
    return pc.binary_join_element_wise(dates, times, "T")
