"""What the first rejected lines of a log show: where they stop to fit the format, and which formats would read them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lockstep.etl.logs.formats import LOG_FORMATS, Form, other_delimiters
from lockstep.etl.logs.values import TIME
from lockstep.etl.reasons import BAD_VALUE, LINE_TOO_LONG, NOT_UTF8
from lockstep.etl.write.refusal import Look

SHOWN = 300  # characters of a line
_PAGE = "docs/formats.md, CSV of another form"
_BAD_VALUE = re.compile(rf'{BAD_VALUE}:(?P<name>.+?): "(?P<value>.*)" is no (?P<kind>.+)')
_COMMA = re.compile(r"\s*[+-]?[\d.]*,\d+\s*")


def look(rejected: Sequence[tuple[bytes, str]], form: Form, *, records: bool) -> Look:
    """What the first rejected lines show, each with its reason; `records` if a schema declares them."""
    if not rejected:
        return Look()
    line, reason = rejected[0]
    words = f"; {_shown(line)}"
    stop = stopped_at(line, reason, form)
    words += f" stops at {stop}" if stop else ""
    wrong = [line for line, reason in rejected if _kind(reason) in form.format.misfits]
    formats = formats_of(wrong, form, records=records) if wrong else []
    if formats:
        return Look(words, f"Give the format of the input: --log-format {' or '.join(formats)} reads these lines.")
    if records or _kind(reason) not in form.format.misfits:
        return Look(words, way_of(reason))
    step = "Check --input and --log-format: no other format reads these lines."
    return Look(words, f"{step} Raise --max-bad to continue with the rest.")


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return json.dumps(text[:SHOWN], ensure_ascii=False) + ("..." if len(text) > SHOWN else "")


def stopped_at(line: bytes, reason: str, form: Form) -> str:
    """Where a line stops to fit: the column (from 1) and what should be there, "" if the reason says all."""
    kind = _kind(reason)
    if kind == NOT_UTF8:
        return _not_text(line)
    text = line.decode("utf-8", "replace")
    if kind in form.format.misfits:
        return form.format.misfits[kind](text)
    return f"column {len(text) + 1}, after {len(line)} bytes" if kind == LINE_TOO_LONG else ""


def way_of(reason: str) -> str:
    """What to do about values in other forms than the job reads; "" for other reasons."""
    found = _BAD_VALUE.fullmatch(reason)
    if found is None:
        return ""
    name, value = found["name"], found["value"]
    if found["kind"] == TIME:
        return (
            f"Other forms of times are converted first ({_PAGE}): to_timestamp({name}, 'dd.MM.yyyy HH:mm') in a query."
        )
    if found["kind"] == "bool":
        texts = f'class_names = ["no", "yes"] in the schema with its own two texts, or --label "{name} = \'{value}\'"'
        return f"If `{name}` is the label, say which text is yes: {texts}. Else declare it as string."
    if found["kind"] in ("float32", "float64") and _COMMA.fullmatch(value):
        return f"Numbers with a decimal comma are converted first ({_PAGE}): replace({name}, ',', '.')."
    return ""


def _kind(reason: str) -> str:
    """A reason without the number of lines."""
    return reason.partition(" ")[0]


def _not_text(line: bytes) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1}, which is no UTF-8"
    return f"byte {line.index(0) + 1}, a NUL" if 0 in line else ""


def formats_of(lines: Sequence[bytes], read_as: Form, *, records: bool) -> list[str]:
    """The formats but `read_as` that read all of these lines; delimiters are in lines of any format, so they count
    only where no other format fits, and those that CSV seldom has only for lines that were read as delimited fields.
    """
    others = [form for form in LOG_FORMATS.values() if form is not read_as.format and (form.is_table or not records)]
    strict = [form for form in reversed(others) if form.delimiter is None]
    delimited = [form for form in others if form.delimiter is not None]
    for tried in (strict, delimited):
        found = [form.name for form in tried if form.reads(lines)]
        if found:
            return found
    return other_delimiters(lines, read_as)
