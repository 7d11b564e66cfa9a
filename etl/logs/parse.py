"""The first pass over a log, in tasks: ranges in; kept rows, refused lines and summaries out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.etl import columns as c
from lockstep.etl.input.files import Range
from lockstep.etl.input.lines import CHUNK_BYTES, RAW_BYTES, FileDigest, LongLine
from lockstep.etl.logs.formats import Form
from lockstep.etl.logs.pages import MAX_LISTED, most_frequent
from lockstep.etl.logs.values import Reasons, without_bom
from lockstep.etl.reasons import LINE_TOO_LONG
from lockstep.etl.spark.tasks import MIN_ROWS, Items

ROW, BAD, SUMMARY, DIGEST, SUFFIX = 0, 1, 2, 3, 4
NO_TIME = -(1 << 62)

# One table for five kinds of rows, since a task has one output; columns of the other kinds are null. The columns of the
# parser follow: their names come from files, so these begin with `_`.
_BASE = pa.schema(
    [
        ("_kind", pa.int32()),
        ("_file", pa.string()),
        *c.REJECTED,
        ("_lines", pa.int64()),
        ("_bad", pa.int64()),
        ("_newlines", pa.int64()),
        ("_bad_newlines", pa.int64()),
        ("_dropped_lines", pa.int64()),
        ("_last_time", pa.int64()),
        ("_first_time", pa.int64()),
        ("_raw_bytes", pa.int64()),
        ("_content_bytes", pa.int64()),
        ("_content_crc32c", pa.string()),
    ]
)
_COUNTS = ("_lines", "_bad", "_raw_bytes", "_newlines", "_bad_newlines")
SUMMARY_COLUMNS = ("_kind", "_source", "_reason", *_BASE.names[_BASE.names.index("_length") :])


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a parser for n lines: columns, each (n,), undefined for lines that are refused or dropped; the
    latest time of those that are not refused (NO_TIME if none), the earliest of those that are kept (None if none), and
    how many kept requests for pages have each suffix.
    """

    columns: Mapping[str, pa.Array]
    reasons: Reasons
    drops: Reasons
    last_time: int = NO_TIME
    first_time: int | None = None
    suffixes: Mapping[str, int] = field(default_factory=dict)


class LineParser(Protocol):
    """The parser of a log's lines; a frozen object that Spark sends to the tasks."""

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
    """A range, the names of its file's fields, and the path of the file in the records' ids."""

    part: Range
    names: tuple[str, ...] = ()
    file: str = ""

    def to_json(self) -> dict[str, Any]:
        """The work as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Work:
        """The work that `found` was."""
        return cls(Range(**found["part"]), tuple(found["names"]), found["file"])


def output_schema(parser: LineParser) -> pa.Schema:
    """The columns of the first pass's rows."""
    return pa.schema([*_BASE, *parser.schema])


@dataclass(frozen=True)
class ParseLog:
    """Reads and parses the ranges of a task: Works as JSON in, rows of output_schema out. Raises what read_lines
    raises.
    """

    parser: LineParser

    def __call__(self, items: Items) -> Iterator[pa.RecordBatch]:
        return parse_ranges([Work.from_json(item) for item in items], self.parser)


def parse_ranges(works: Sequence[Work], parser: LineParser) -> Iterator[pa.RecordBatch]:
    """The rows of some ranges: kept rows, refused lines, and at the end the summaries: what was read in total, what was
    dropped for each reason, the suffixes of pages, and length and SHA-256 of each file that is one range.

    Lines of small files are parsed together, since a call of the parser costs as much as a thousand lines.
    """
    schema = output_schema(parser)
    held, sums = _Held(), _Sums()
    for work in works:
        if held.names_differ(work):
            yield from _parsed(held, parser, schema, sums)
            held = _Held()
        for lines in parser.form.lines_of(work.part, digest=True):
            if isinstance(lines, FileDigest):
                sums.add_file(work, lines)
                continue
            if isinstance(lines, LongLine):
                sums.add(lines=1, bad=1, raw_bytes=len(lines.raw), newlines=lines.newlines, bad_newlines=lines.newlines)
                yield _batch(schema, BAD, [work], np.zeros(1, np.int64), **_long_columns(lines))
                continue
            positions, values = lines.positions, lines.values
            if positions[0] == 0:
                skip = int(parser.form.has_header)
                positions, values = positions[skip:], without_bom(values).slice(skip)
            for names, rows in _sections(parser.form, values, work.names):
                if names != work.names:
                    work = replace(work, names=names)
                    yield from _parsed(held, parser, schema, sums)
                    held = _Held()
                some = (positions, values) if rows is None else (positions[rows], values.take(rows))
                sums.records[work.part.source_index] += len(some[0])
                held.add(work, *some)
            if held.is_full:
                yield from _parsed(held, parser, schema, sums)
                held = _Held()
    yield from _parsed(held, parser, schema, sums)
    yield from sums.batches(schema, works[0])


def _sections(
    form: Form, lines: pa.Array, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], NDArray[np.int64] | None]]:
    """The places of the records among lines, None for all, by the names of their fields."""
    sections = form.format.sections
    return iter([(names, None)]) if sections is None else sections(lines, names)


class _Held:
    """Lines of some ranges, to be parsed together."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._positions: list[NDArray[np.int64]] = []
        self._values: list[pa.Array] = []
        self._lines = self._bytes = 0

    def names_differ(self, work: Work) -> bool:
        return bool(self.works) and self.works[0].names != work.names

    @property
    def is_full(self) -> bool:
        return self._lines >= MIN_ROWS or self._bytes >= CHUNK_BYTES

    def add(self, work: Work, positions: NDArray[np.int64], values: pa.Array) -> None:
        if len(positions):
            self.works.append(work)
            self._positions.append(positions)
            self._values.append(values)
            self._lines, self._bytes = self._lines + len(positions), self._bytes + values.nbytes

    def lines(self) -> tuple[NDArray[np.int64], NDArray[np.int64], pa.Array]:
        """For each line (n,): the number of its range in `works`, its position, and the line."""
        owners = np.repeat(np.arange(len(self.works)), [len(part) for part in self._positions])
        values = self._values[0] if len(self._values) == 1 else pa.concat_arrays(self._values)
        return owners, np.concatenate(self._positions), values


@dataclass
class _Sums:
    """The counts of a task's ranges, and the digests of its whole files. Newlines are those inside records."""

    lines: int = 0
    bad: int = 0
    raw_bytes: int = 0
    newlines: int = 0
    bad_newlines: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    last_time: int = NO_TIME
    first_time: int | None = None
    suffixes: Counter[str] = field(default_factory=Counter)
    files: list[Work] = field(default_factory=list)
    digests: list[FileDigest] = field(default_factory=list)
    records: Counter[int] = field(default_factory=Counter)
    """Lines of each file, by its number, without those that are too long."""

    def add_file(self, work: Work, digest: FileDigest) -> None:
        self.files.append(work)
        self.digests.append(digest)

    def add(
        self, *, lines: int = 0, bad: int = 0, raw_bytes: int = 0, newlines: int = 0, bad_newlines: int = 0
    ) -> None:
        self.lines, self.bad, self.raw_bytes = self.lines + lines, self.bad + bad, self.raw_bytes + raw_bytes
        self.newlines, self.bad_newlines = self.newlines + newlines, self.bad_newlines + bad_newlines

    def add_found(self, found: Found) -> None:
        """Count the result of a parser."""
        good = found.reasons.good
        self.add(lines=len(good), bad=int((~good).sum()))
        self.dropped.update(found.drops.counts(good))
        self.last_time = max(self.last_time, found.last_time)
        firsts = [time for time in (self.first_time, found.first_time) if time is not None]
        self.first_time = min(firsts, default=None)
        self.suffixes.update(found.suffixes)

    def batches(self, schema: pa.Schema, work: Work) -> Iterator[pa.RecordBatch]:
        """The summaries; those of all ranges as of `work`."""
        counts = {name: [getattr(self, name.removeprefix("_"))] for name in _COUNTS}
        one, place = np.zeros(1, np.int64), [work.part.start]
        times = {"_last_time": [self.last_time], "_first_time": [self.first_time]}
        yield _batch(schema, SUMMARY, [work], one, _position=place, **counts, **times)
        for reason, n in sorted(self.dropped.items()):
            yield _batch(schema, SUMMARY, [work], one, _position=place, _reason=[reason], _dropped_lines=[n])
        if self.suffixes:
            counted = most_frequent(self.suffixes, MAX_LISTED)
            often = {"_reason": list(counted), "_lines": list(counted.values())}
            yield _batch(schema, SUFFIX, [work], np.zeros(len(counted), np.int64), **often)
        if self.files:
            found: dict[str, list[Any]] = {
                "_length": [file.part.length for file in self.files],
                "_lines": [self.records[file.part.source_index] for file in self.files],
                "_sha256": [one.sha256 for one in self.digests],
                "_content_bytes": [one.content.row["content_bytes"] for one in self.digests],
                "_content_crc32c": [one.content.row["content_crc32c"] for one in self.digests],
            }
            yield _batch(schema, DIGEST, self.files, np.arange(len(self.files)), **found)


def _parsed(held: _Held, parser: LineParser, schema: pa.Schema, sums: _Sums) -> Iterator[pa.RecordBatch]:
    """The rows of the held lines."""
    if not held.works:
        return
    works, (owners, positions, values) = held.works, held.lines()
    found = parser.parse(values, works[0].names)
    sums.add_found(found)
    good = found.reasons.good
    kept = good & found.drops.good
    if kept.any():
        mask = pa.array(kept)
        columns = {name: column.filter(mask) for name, column in found.columns.items()}
        yield _batch(schema, ROW, works, owners[kept], _position=positions[kept], **columns)
    newlines = None
    if parser.form.quoted_newlines:
        newlines = np.asarray(pc.count_substring(values, "\n"))
        sums.add(newlines=int(newlines.sum()), bad_newlines=int(newlines[~good].sum()))
    if not good.all():
        refused = _bad_columns(positions, values, found.reasons, newlines)
        sums.add(raw_bytes=pc.sum(pc.binary_length(refused["_raw"])).as_py())
        yield _batch(schema, BAD, works, owners[~good], **refused)


def _batch(
    schema: pa.Schema, kind: int, works: Sequence[Work], owners: NDArray[np.int64], **columns: Any
) -> pa.RecordBatch:
    """A batch of the rows (n,), each of the one of `works` that `owners` (n,) names; columns not given are null."""
    count = len(owners)
    columns["_kind"] = np.full(count, kind, dtype=np.int32)
    columns["_source"] = np.array([work.part.source_index for work in works], dtype=np.int32)[owners]
    if kind == ROW:
        columns["_file"] = pa.array([work.file for work in works], pa.string()).take(pa.array(owners))
    arrays = []
    for named in schema:
        values = columns.get(named.name)
        if values is None:
            arrays.append(pa.nulls(count, named.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, type=named.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _bad_columns(
    positions: NDArray[np.int64], values: pa.Array, reasons: Reasons, newlines: NDArray[np.int64] | None
) -> dict[str, Any]:
    bad = ~reasons.good
    refused = values.filter(pa.array(bad))
    names = reasons.names(bad)
    if newlines is not None and newlines[bad].any():
        names = pa.array(map(_with_lines, names.to_pylist(), newlines[bad].tolist()), pa.string())
    return {
        "_position": positions[bad],
        "_reason": names,
        "_raw": pc.binary_slice(refused, 0, RAW_BYTES),
        "_length": pc.binary_length(refused).cast(pa.int64()),
        "_sha256": [hashlib.sha256(value).hexdigest() for value in refused.to_pylist()],
    }


def _with_lines(reason: str, newlines: int) -> str:
    """The reason of a record, with the number of its lines if it has more than one."""
    return f"{reason} ({newlines + 1} lines)" if newlines else reason


def _long_columns(line: LongLine) -> dict[str, Any]:
    return {
        "_position": [line.position],
        "_reason": [_with_lines(LINE_TOO_LONG, line.newlines)],
        "_raw": [line.raw],
        "_length": [line.length],
        "_sha256": [line.sha256],
    }
