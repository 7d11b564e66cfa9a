"""What the first rejected lines of a log show: where they stop to fit the format, and which formats would read them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence

import pyarrow as pa

from lockstep.etl.input.log_formats import DELIMITERS
from lockstep.etl.logs.alb import parse_alb
from lockstep.etl.logs.fields import Form
from lockstep.etl.logs.server_log import (
    MORE,
    QUOTED,
    USER,
    parse_combined,
    parse_common,
)
from lockstep.etl.reasons import (
    BAD_QUOTES,
    LINE_TOO_LONG,
    NOT_COMBINED_LOG,
    NOT_COMMON_LOG,
    NOT_JSON,
    NOT_UTF8,
    OPEN_QUOTE,
    TOO_FEW_FIELDS,
    TOO_MANY_FIELDS,
)
from lockstep.etl.write.refusal import Look

SHOWN = 300  # characters of a line
_PARSERS = {"common": parse_common, "combined": parse_combined, "alb": parse_alb}
_FRONT = (
    ("a host", r"\S+"),
    ("an ident", r" \S+"),
    ("a user", rf" {USER}"),
    ("a [time]", r" \[[^\]]*\]"),
    ('a "request"', rf' "{QUOTED}"'),
    ("a status", r" (?:\d{3}|-)(?!\S)"),
    ("a size", r" (?:\d+|-)(?!\S)"),
)
_PARTS = {
    NOT_COMMON_LOG: (*_FRONT, ("the end or further fields", rf"{MORE} *$")),
    NOT_COMBINED_LOG: (
        *_FRONT,
        ('a "referrer"', rf' "{QUOTED}"'),
        ('a "user agent"', rf' "{QUOTED}"'),
        ("the end or further fields", rf"{MORE} *$"),
    ),
}


def look(rejected: Sequence[tuple[bytes, str]], form: Form, *, records: bool) -> Look:
    """What the first rejected lines show, each with its reason; `records` if a schema declares them."""
    if not rejected:
        return Look()
    line, reason = rejected[0]
    words = f"; {_shown(line)}"
    stop = stopped_at(line, reason, form)
    words += f" stops at {stop}" if stop else ""
    wrong = [line for line, reason in rejected if _whole_line(reason)]
    formats = formats_of(wrong, form.log_format, records=records) if wrong else []
    if formats:
        return Look(words, f"Give the format of the input: --log-format {' or '.join(formats)} reads these lines.")
    if records or not _whole_line(reason):
        return Look(words)
    step = "Check --input and --log-format: no other format reads these lines."
    return Look(words, f"{step} Raise --max-bad to continue with the rest.")


def _whole_line(reason: str) -> bool:
    """Whether a line does not have the format at all."""
    kinds = (NOT_COMMON_LOG, NOT_COMBINED_LOG, NOT_JSON, TOO_FEW_FIELDS, TOO_MANY_FIELDS, OPEN_QUOTE, BAD_QUOTES)
    return reason.partition(" ")[0] in kinds


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return json.dumps(text[:SHOWN], ensure_ascii=False) + ("..." if len(text) > SHOWN else "")


def stopped_at(line: bytes, reason: str, form: Form) -> str:
    """Where a line stops to fit: the column (from 1) and what should be there, "" if the reason says all."""
    kind = reason.partition(" ")[0]
    if kind == NOT_UTF8:
        return _not_text(line)
    text = line.decode("utf-8", "replace")
    if kind in _PARTS:
        return _not_log(text, kind)
    if kind == NOT_JSON:
        return _not_json(text)
    if kind in (OPEN_QUOTE, BAD_QUOTES):
        return _not_quoted(text)
    if kind in (TOO_FEW_FIELDS, TOO_MANY_FIELDS):
        count = text.count(DELIMITERS[form.log_format]) + 1 if form.log_format == "tsv" else len(_cells(text, ","))
        return f"its end, after {count} fields"
    return f"column {len(text) + 1}, after {len(line)} bytes" if kind == LINE_TOO_LONG else ""


def _not_text(line: bytes) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1}, which is no UTF-8"
    return f"byte {line.index(0) + 1}, a NUL" if 0 in line else ""


def _not_log(text: str, kind: str) -> str:
    end = 0
    for name, pattern in _PARTS[kind]:
        found = re.compile(pattern).match(text, end)
        if found is None:
            return f"column {end + 1 + (text[end : end + 1] == ' ')}, where {name} should be"
        end = found.end()
    return ""


def _not_json(text: str) -> str:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"column {error.pos + 1}: {error.msg}"
    except (ValueError, RecursionError) as error:
        return f"{error}"[:100]
    return "" if isinstance(found, dict) else f"column 1: a {type(found).__name__}, not an object"


def _not_quoted(text: str) -> str:
    """The place of the first quote that neither opens, closes nor is doubled."""
    opened = 0
    state = "start"
    for place, letter in enumerate(text):
        if state == "quoted":
            state = "closed" if letter == '"' else "quoted"
        elif letter == '"' and state == "plain":
            return f"column {place + 1}, a quote inside a field"
        elif letter == '"':
            opened, state = (place, "quoted") if state == "start" else (opened, "quoted")
        elif letter == ",":
            state = "start"
        elif state == "closed":
            return f"column {place + 1}, text behind a closing quote"
        else:
            state = "plain"
    return f"its end: the quote of column {opened + 1} is not closed" if state == "quoted" else ""


def formats_of(lines: Sequence[bytes], log_format: str, *, records: bool) -> list[str]:
    """The formats but `log_format` that read all of these lines; delimiters are in lines of any format, so they count
    only where no other format fits.
    """
    strict = ("json",) if records else ("combined", "common", "json", "alb", "w3c")
    for tried in (strict, tuple(DELIMITERS)):
        found = [name for name in tried if name != log_format and _reads(lines, name)]
        if found:
            return found
    return []


def _reads(lines: Sequence[bytes], log_format: str) -> bool:
    if log_format == "w3c":  # each file begins with such lines
        return any(line.startswith((b"#Fields:", b"#Version:", b"#Software:")) for line in lines)
    if log_format in _PARSERS:
        return bool(_PARSERS[log_format](pa.array(lines, pa.binary())).reasons.good.all())
    texts = [line.decode("utf-8", "replace") for line in lines]
    if log_format == "json":
        return all(_not_json(text) == "" for text in texts)
    counts = {len(_cells(text, DELIMITERS[log_format])) for text in texts}
    return len(counts) == 1 and min(counts) > 1


def _cells(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([text.replace("\n", " ")], delimiter=delimiter), [])
    except csv.Error:
        return []
