"""The names of the fields in each file of a table, from its first line: read by the driver before Spark starts."""

from __future__ import annotations

import csv
import json
from typing import Any

import pyarrow as pa

from etl.input.lines import MAX_LINE_BYTES, Lines, LongLine, read_lines
from etl.input.ranges import Range, Source
from etl.logs.fields import DELIMITERS
from etl.logs.text import without_bom
from lockstep.storage.errors import DataError

HEAD_BYTES = 64 << 10
HEAD_LINES = 100
MAX_NAMES = 10_000


def names_in(source: Source, log_format: str, quoted_newlines: bool) -> tuple[str, ...]:
    """The names in a file's header (TSV and CSV), or the keys of its first JSON objects, () where it has none early on.

    Raises DataError naming the file for a header that is none.
    """
    head = _head(source, quoted_newlines)
    if log_format == "json":
        return tuple(dict.fromkeys(key for document in _objects(head) for key in document))
    line = head[0] if head else b""
    try:
        text = line.decode("utf-8")
        names = _fields(text, DELIMITERS[log_format]) if log_format == "csv" else text.split("\t")
    except (UnicodeDecodeError, csv.Error) as error:
        raise _bad_header(source.url, str(error)) from None
    while names and not names[-1]:
        names.pop()
    if not names or len(names) > MAX_NAMES or "\0" in text:
        raise _bad_header(source.url, f"{len(names)} names, {len(line)} bytes: {line[:80]!r}")
    return tuple(names)


def kinds_in(source: Source) -> dict[str, pa.DataType]:
    """The types of the scalars in a file's first JSON objects, by their keys: whole numbers and others are float64."""
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    found: dict[str, pa.DataType] = {}
    for document in _objects(_head(source, False)):
        for key, value in document.items():
            if type(value) in kinds:
                kind = found.setdefault(key, kinds[type(value)])
                if pa.types.is_integer(kind) and type(value) is float:
                    found[key] = pa.float64()
    return found


def _head(source: Source, quoted_newlines: bool) -> list[bytes]:
    """The first lines of a file; [] where its first line is longer than any."""
    part = Range(0, source.url, 0, min(HEAD_BYTES, source.size_bytes), source.codec)
    lines = read_lines(part, HEAD_BYTES, quoted_newlines=quoted_newlines, most_bytes=2 * MAX_LINE_BYTES)
    first: Lines | LongLine | None = next(lines, None)
    if not isinstance(first, Lines):
        return []
    values: pa.Array = without_bom(first.values)
    return [value for value in values.to_pylist() if isinstance(value, bytes)]


def _fields(text: str, delimiter: str) -> list[str]:
    return next(csv.reader([text], delimiter=delimiter, strict=True), [])


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    """The objects among the first lines; what is none will be told when it is read as a record."""
    found = []
    for line in lines[:HEAD_LINES]:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def _bad_header(url: str, got: str) -> DataError:
    return DataError(
        f"the first line of {url} names no fields",
        got=got,
        allowed=f"1 to {MAX_NAMES} names in UTF-8 with the format's delimiter between them",
        next_step="Check --log-format; give the names by --columns where the file has no header.",
    )
