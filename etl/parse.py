"""The first pass over a log, in the tasks: ranges in; kept rows, refused lines and summaries of each range out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etl.columns import quoted
from etl.lines import RAW_BYTES, LongLine, read_lines
from etl.ranges import Range
from etl.reasons import Reasons
from etl.table_lines import Form
from etl.tasks import EachRow
from etl.text import without_bom

ROW, BAD, SUMMARY = 0, 1, 2
LINE_TOO_LONG = "line_too_long"
NO_TIME = -(1 << 62)

# The work of a task: a range, the names of its file's fields, and how the file is called in the records' ids.
WORK_DDL = (
    "source_index int, url string, start bigint, length bigint, codec string, names array<string>, file string,"
    " occurrence bigint"
)
# One table for three kinds of rows, since a task has one output; columns of the other kinds are null. The parser's own
# columns follow: theirs are names out of files, so these begin with `_`.
_BASE = pa.schema(
    [
        ("_kind", pa.int32()),
        ("_source", pa.int32()),
        ("_position", pa.int64()),
        ("_file", pa.string()),
        ("_occurrence", pa.int64()),
        ("_reason", pa.string()),
        ("_raw", pa.binary()),
        ("_length", pa.int64()),
        ("_sha256", pa.string()),
        ("_lines", pa.int64()),
        ("_bad", pa.int64()),
        ("_dropped_lines", pa.int64()),
        ("_last_time", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a parser makes of n lines: its columns, each (n,), rubbish in lines that are refused or dropped, and the
    largest time among those that are not refused (NO_TIME without).
    """

    columns: Mapping[str, pa.Array]
    reasons: Reasons
    drops: Reasons
    last_time: int = NO_TIME


class LineParser(Protocol):
    """What is kept of the lines of a log; a frozen object that Spark ships to the tasks."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of a kept row."""

    @property
    def form(self) -> Form:
        """How the lines are to be read."""

    def parse(self, lines: pa.Array, names: Sequence[str]) -> Found:
        """Parse lines (n,) binary of a file whose fields have `names`."""


@dataclass(frozen=True, slots=True)
class Work:
    """One task's range, as WORK_DDL has it."""

    part: Range
    names: tuple[str, ...] = ()
    file: str = ""
    occurrence: int = 0

    def row(self) -> tuple[object, ...]:
        """The row of WORK_DDL."""
        part = self.part
        where = (part.source_index, part.url, part.start, part.length, part.codec)
        return (*where, list(self.names), self.file, self.occurrence)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Work:
        """The work that `row` was."""
        part = Range(row["source_index"], row["url"], row["start"], row["length"], row["codec"])
        return cls(part, tuple(row["names"]), row["file"], row["occurrence"])


def output_schema(parser: LineParser) -> pa.Schema:
    """The columns of the first pass's rows."""
    return pa.schema([*_BASE, *parser.schema])


def output_ddl(parser: LineParser) -> str:
    """The same in Spark's notation."""
    return ddl_of(output_schema(parser))


class ParseLog(EachRow):
    """The function for mapInArrow: rows of WORK_DDL in, rows of output_schema out."""

    def __init__(self, settings: dict[str, str], parser: LineParser) -> None:
        super().__init__(settings)
        self._parser = parser

    def batches_of(self, row: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Read and parse a range. Raises what read_lines raises."""
        return parse_range(Work.from_row(row), self._parser)


def parse_range(work: Work, parser: LineParser) -> Iterator[pa.RecordBatch]:
    """The rows of one range: kept rows, refused lines, and last the summaries: what was read, and what was dropped
    for each reason. `_position` of a summary is the range's start.
    """
    rows = _Rows(work, output_schema(parser))
    lines_read, bad, dropped, last_time = 0, 0, dict[str, int](), NO_TIME
    for lines in read_lines(work.part, quoted_newlines=parser.form.quoted_newlines):
        if isinstance(lines, LongLine):
            lines_read, bad = lines_read + 1, bad + 1
            yield rows.batch(BAD, 1, **_long_columns(lines))
            continue
        positions, values = lines.positions, lines.values
        if positions[0] == 0:
            skip = int(parser.form.has_header)
            positions, values = positions[skip:], without_bom(values).slice(skip)
        if not len(positions):
            continue
        found = parser.parse(values, work.names)
        good = found.reasons.good
        kept = good & found.drops.good
        lines_read, bad = lines_read + len(good), bad + int((~good).sum())
        for reason, n in found.drops.counts(good).items():
            dropped[reason] = dropped.get(reason, 0) + n
        last_time = max(last_time, found.last_time)
        if kept.any():
            mask = pa.array(kept)
            columns = {name: column.filter(mask) for name, column in found.columns.items()}
            yield rows.batch(ROW, int(kept.sum()), _position=positions[kept], **columns)
        if not good.all():
            yield rows.batch(BAD, int((~good).sum()), **_bad_columns(positions, values, found.reasons))
    start = [work.part.start]
    yield rows.batch(SUMMARY, 1, _position=start, _lines=[lines_read], _bad=[bad], _last_time=[last_time])
    for reason, n in sorted(dropped.items()):
        yield rows.batch(SUMMARY, 1, _position=start, _reason=[reason], _dropped_lines=[n])


def _bad_columns(positions: NDArray[np.int64], values: pa.Array, reasons: Reasons) -> dict[str, Any]:
    bad = ~reasons.good
    refused = values.filter(pa.array(bad))
    return {
        "_position": positions[bad],
        "_reason": reasons.names(bad),
        "_raw": pc.binary_slice(refused, 0, RAW_BYTES),
        "_length": pc.binary_length(refused).cast(pa.int64()),
        "_sha256": [hashlib.sha256(value).hexdigest() for value in refused.to_pylist()],
    }


def _long_columns(line: LongLine) -> dict[str, Any]:
    return {
        "_position": [line.position],
        "_reason": [LINE_TOO_LONG],
        "_raw": [line.raw],
        "_length": [line.length],
        "_sha256": [line.sha256],
    }


class _Rows:
    """Makes batches of the output's columns for one range."""

    def __init__(self, work: Work, schema: pa.Schema) -> None:
        self._work, self._schema = work, schema

    def batch(self, kind: int, count: int, **columns: Any) -> pa.RecordBatch:
        """A batch of `count` rows; columns not given are null."""
        columns["_kind"] = np.full(count, kind, dtype=np.int32)
        columns["_source"] = np.full(count, self._work.part.source_index, dtype=np.int32)
        if kind == ROW:
            columns["_file"] = pa.repeat(self._work.file, count)
            columns["_occurrence"] = np.full(count, self._work.occurrence, dtype=np.int64)
        arrays = []
        for field in self._schema:
            values = columns.get(field.name)
            if values is None:
                arrays.append(pa.nulls(count, field.type))
            else:
                arrays.append(values if isinstance(values, pa.Array) else pa.array(values, type=field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def ddl_of(schema: pa.Schema) -> str:
    """Columns in Spark's notation."""
    return ", ".join(f"{quoted(field.name)} {ddl_type(field.type)}" for field in schema)


def ddl_type(kind: pa.DataType) -> str:
    """An Arrow type in Spark's notation."""
    if pa.types.is_list(kind):
        return f"array<{ddl_type(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    names = {"int32": "int", "int64": "bigint", "float": "float", "double": "double", "bool": "boolean"}
    return names.get(str(kind), str(kind))  # string and binary are called so by both
