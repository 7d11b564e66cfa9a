"""The first pass over a log, in the tasks: ranges in; page requests, quarantined lines and a summary a range out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl import clf
from etl.lines import RAW_BYTES, Lines, LongLine, read_lines
from etl.ranges import Range
from etl.spark_errors import in_task
from etl.weblog import is_page
from storage.settings import set_hadoop_settings

RANGE_DDL = "source_index int, url string, start bigint, length bigint, codec string"
PAGE, BAD, SUMMARY = 0, 1, 2
LINE_TOO_LONG = "line_too_long"
NO_TIME = -(1 << 62)

# One table for three kinds of rows, since a task has one output; columns of the other kinds are null.
OUTPUT = pa.schema(
    [
        ("kind", pa.int32()),
        ("source", pa.int32()),
        ("position", pa.int64()),
        ("visitor", pa.string()),
        ("page", pa.string()),
        ("query", pa.string()),
        ("time", pa.int64()),
        ("reason", pa.string()),
        ("raw", pa.binary()),
        ("length", pa.int64()),
        ("sha256", pa.string()),
        ("lines", pa.int64()),
        ("bad", pa.int64()),
        ("dropped", pa.int64()),
        ("last_time", pa.int64()),
    ]
)
OUTPUT_DDL = (
    "kind int, source int, position bigint, visitor string, page string, query string, time bigint, reason string,"
    " raw binary, length bigint, sha256 string, lines bigint, bad bigint, dropped bigint, last_time bigint"
)


@dataclass(slots=True)
class _Tally:
    lines: int = 0
    bad: int = 0
    dropped: int = 0
    last_time: int = NO_TIME


class ParseLog:
    """The function for mapInArrow: rows of RANGE_DDL in, rows of OUTPUT_DDL out."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._settings = settings

    @in_task
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read and parse each range. Raises what read_lines raises."""
        set_hadoop_settings(self._settings)
        for batch in batches:
            for row in batch.to_pylist():
                yield from parse_range(Range(**row))


def parse_range(part: Range) -> Iterator[pa.RecordBatch]:
    """The rows of one range: pages, bad lines, and last a summary (`position` is the range's start)."""
    tally = _Tally()
    for lines in read_lines(part):
        if isinstance(lines, LongLine):
            tally.lines += 1
            tally.bad += 1
            yield _rows(BAD, part.source_index, 1, **_long_columns(lines))
        else:
            yield from _parse_lines(part, lines, tally)
    yield _rows(
        SUMMARY,
        part.source_index,
        1,
        position=[part.start],
        lines=[tally.lines],
        bad=[tally.bad],
        dropped=[tally.dropped],
        last_time=[tally.last_time],
    )


def _parse_lines(part: Range, lines: Lines, tally: _Tally) -> Iterator[pa.RecordBatch]:
    requests = clf.parse(lines.values)
    good = np.array([reason is None for reason in requests.reasons], dtype=bool)
    pages = good & is_page(requests.method, requests.page, requests.status)
    tally.lines += len(good)
    tally.bad += int((~good).sum())
    tally.dropped += int((good & ~pages).sum())
    if good.any():
        tally.last_time = max(tally.last_time, int(requests.time[good].max()))
    if pages.any():
        kept = pa.array(pages)
        columns = {name: getattr(requests, name).filter(kept) for name in ("visitor", "page", "query")}
        times = pa.array(requests.time[pages])
        yield _rows(PAGE, part.source_index, int(pages.sum()), position=lines.positions[pages], time=times, **columns)
    if not good.all():
        yield _rows(BAD, part.source_index, int((~good).sum()), **_bad_columns(lines, requests.reasons, ~good))


def _bad_columns(lines: Lines, reasons: np.ndarray, bad: np.ndarray) -> dict[str, Any]:
    values = lines.values.filter(pa.array(bad))
    return {
        "position": lines.positions[bad],
        "reason": reasons[bad].tolist(),
        "raw": pc.binary_slice(values, 0, RAW_BYTES),
        "length": pc.binary_length(values).cast(pa.int64()),
        "sha256": [hashlib.sha256(value).hexdigest() for value in values.to_pylist()],
    }


def _long_columns(line: LongLine) -> dict[str, Any]:
    return {
        "position": [line.position],
        "reason": [LINE_TOO_LONG],
        "raw": [line.raw],
        "length": [line.length],
        "sha256": [line.sha256],
    }


def _rows(kind: int, source: int, count: int, **columns: Any) -> pa.RecordBatch:
    """A batch of `count` rows of OUTPUT; columns not given are null."""
    columns |= {"kind": np.full(count, kind, dtype=np.int32), "source": np.full(count, source, dtype=np.int32)}
    arrays = []
    for field in OUTPUT:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(count, field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)
