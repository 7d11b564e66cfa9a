"""Lines of a byte range: a line belongs to the range in which it begins; positions count decompressed bytes.

If newlines may occur inside quotes (CSV), a "line" here is a record: it ends at the first newline outside quotes. A
quote opens only at the start of a field, and is text elsewhere. This can only be decided from the start of the file, so
such a file is one range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.etl.input.files import BOM, Content, HashedFile, Range
from lockstep.etl.input.unpack import PLAIN, unpacked
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20  # longer lines are hashed and counted, never held in memory
RAW_BYTES = 64 << 10
_NEWLINE, _RETURN, _QUOTE = 10, 13, 34


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines without line ends: positions of their first bytes (n,) int64, and their bytes (n,) binary."""

    positions: NDArray[np.int64]
    values: pa.Array


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 (hex) of a whole file, after its last line, and length and CRC-32C of its content, unpacked."""

    sha256: str
    content: Content


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line of more than MAX_LINE_BYTES: its first RAW_BYTES, and length and SHA-256 (hex) of the whole line.
    `newlines` are those inside it, 0 unless it is a record with quotes.
    """

    position: int
    raw: bytes
    length: int
    sha256: str
    newlines: int = 0


def read_lines(
    part: Range,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    quoted_newlines: bool = False,
    delimiter: str = ",",
    most_bytes: int | None = None,
    digest: bool = False,
) -> Iterator[Lines | LongLine | FileDigest]:
    """Yield the lines that begin in the range, some thousand at a time; with `most_bytes` only those in about the first
    `most_bytes` of a packed file, the last of which may be cut. With `digest`, the last
    item for a range that is a whole file is its FileDigest. With `quoted_newlines`, a quote opens a field behind
    `delimiter`, an ASCII character.

    Raises DataError naming the file if a packed stream is cut or damaged, or if the file does not have its planned
    length.
    """
    quoted = ord(delimiter) if quoted_newlines else None
    with filesystem(part.url).open_read(part.url) as file:
        if part.whole and digest:
            hashed, content = HashedFile(file), Content()
            # reads like a BinaryIO, but is not declared as one
            yield from _lines_in(part, cast(BinaryIO, hashed), chunk_bytes, quoted, most_bytes, content)
            sha256 = hashed.whole(part.url, part.length)
            yield FileDigest(sha256, hashed.content if part.codec == PLAIN else content)
        else:
            yield from _lines_in(part, file, chunk_bytes, quoted, most_bytes)


def _lines_in(
    part: Range,
    file: BinaryIO,
    chunk_bytes: int,
    quoted: int | None,
    most_bytes: int | None,
    content: Content | None = None,
) -> Iterator[Lines | LongLine]:
    """The lines of a range; `content` counts the bytes of a packed file. `quoted` is the delimiter where quotes have a
    meaning.
    """
    if part.codec != PLAIN:
        pieces = unpacked(part.url, file, part.codec, chunk_bytes)
        pieces = pieces if content is None else content.through(pieces)
        pieces = pieces if most_bytes is None else islice(pieces, -(-most_bytes // chunk_bytes))
        yield from _split(pieces, 0, None, quoted)
        return
    begin = max(part.start - 1, 0)
    if begin:
        file.seek(begin)
    pieces = _plain(part, file, begin, chunk_bytes)
    if part.start:
        # If the byte before is a newline, a line begins at `start`; else skip the rest of the line.
        begin, pieces = _skip_line(pieces, begin)
    yield from _split(pieces, begin, part.start + part.length, quoted)


def _plain(part: Range, file: BinaryIO, begin: int, chunk_bytes: int) -> Iterator[bytes]:
    read = begin
    while data := file.read(chunk_bytes):
        read += len(data)
        yield data
    if read < part.start + part.length:
        raise DataError(
            f"input {part.url} became shorter while it was read",
            got=f"{read} bytes",
            allowed=f"at least {part.start + part.length} bytes",
            next_step="Run again when nothing writes to the input.",
        )


def _skip_line(pieces: Iterator[bytes], begin: int) -> tuple[int, Iterator[bytes]]:
    """Drop bytes up to the first newline; returns the position after it and the remaining pieces."""
    position = begin
    for piece in pieces:
        found = piece.find(b"\n")
        if found >= 0:
            rest = piece[found + 1 :]
            return position + found + 1, _chain(rest, pieces)
        position += len(piece)
    return position, iter(())


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _split(pieces: Iterator[bytes], begin: int, end: int | None, quoted: int | None) -> Iterator[Lines | LongLine]:
    """Cut the bytes from position `begin` into lines that begin before `end` (None: all)."""
    position, pending = begin, b""  # `position` is that of pending's first byte, which begins a line
    long: _Long | None = None
    for piece in pieces:
        if end is not None and position >= end:
            return
        if long is not None:
            found = long.end_in(piece)
            long.add(piece if found < 0 else piece[:found])
            if found < 0:
                continue
            yield long.finish()
            position, long, piece = long.position + long.length + 1, None, piece[found + 1 :]
        data = pending + piece if pending else piece
        array = np.frombuffer(data, dtype=np.uint8)
        ends = _ends(array, _first_place(data, position, quoted))
        used = int(ends[-1]) + 1 if len(ends) else 0
        yield from _whole_lines(data, array, ends, position, end)
        position, pending = position + used, data[used:]
        if len(pending) > MAX_LINE_BYTES:
            long, pending = _Long(position, pending, _first_place(pending, position, quoted)), b""
    if end is not None and position >= end:
        return
    if long is not None:
        yield long.finish()
    elif pending:
        array = np.frombuffer(pending, dtype=np.uint8)
        yield from _whole_lines(pending, array, np.array([len(pending)], dtype=np.int64), position, end)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a reader of CSV is between two pieces: inside quotes or not, and the index in the next piece at which a
    quote opens although no delimiter is before it there (-1: none), since a field or line begins, or a quote closed
    just before: the two are then one quote of the text.
    """

    delimiter: int
    inside: bool = False
    opens_at: int = 0

    def quotes_in(self, array: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The positions of the quotes in the next piece that open or close, (n,) int64; the others are text."""
        places = np.flatnonzero(array == _QUOTE)
        if not len(places):
            return places
        before = array[np.maximum(places - 1, 0)]
        starts = ((places > 0) & ((before == self.delimiter) | (before == _NEWLINE))) | (places == self.opens_at)
        # Quotes open and close in turn, as long as each that should open does so at a start, or behind one that closed.
        first = int(self.inside)
        behind = (places[first::2] > 0) & (before[first::2] == _QUOTE)
        stray = np.flatnonzero(~(starts[first::2] | behind))
        if not len(stray):
            return places
        known = first + 2 * int(stray[0])
        kept, inside, closed = places[:known].tolist(), False, int(places[known - 1]) if known else -2
        for place, start in zip(places[known:].tolist(), starts[known:].tolist(), strict=True):
            if inside:
                inside, closed = False, place
            elif start or place == closed + 1:
                inside = True
            else:
                continue
            kept.append(place)
        return np.array(kept, dtype=np.int64)

    def after(self, array: NDArray[np.uint8]) -> _Place:
        """The place after the next piece."""
        if not len(array):
            return self
        quotes = self.quotes_in(array)
        inside = self.inside ^ (len(quotes) % 2 == 1)
        closed = len(quotes) > 0 and quotes[-1] == len(array) - 1
        starts = closed or array[-1] in (self.delimiter, _NEWLINE)
        return _Place(self.delimiter, inside, 0 if starts and not inside else -1)


def _first_place(data: bytes, position: int, quoted: int | None) -> _Place | None:
    """The place at the start of a line, in bytes from `position`; a byte order mark is no part of the first field. None
    if quotes have no meaning, for `quoted` None.
    """
    return (
        None if quoted is None else _Place(quoted, opens_at=len(BOM) if position == 0 and data.startswith(BOM) else 0)
    )


def _ends(array: NDArray[np.uint8], place: _Place | None) -> NDArray[np.int64]:
    """The positions of the newlines that end lines, (n,) int64; `place` is that of the first byte, None if quotes have
    no meaning.
    """
    newlines = array == _NEWLINE
    if place is not None:
        quotes = np.zeros(len(array), dtype=bool)
        quotes[place.quotes_in(array)] = True
        if place.inside or quotes.any():
            newlines &= np.logical_xor.accumulate(quotes) == place.inside
    return np.flatnonzero(newlines)


def _whole_lines(
    data: bytes, array: NDArray[np.uint8], ends: NDArray[np.int64], position: int, end: int | None
) -> Iterator[Lines | LongLine]:
    """The lines of `data`, which starts with a line at `position`; `array` is the same bytes, `ends` the line ends."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1]) if len(ends) else ends
    if end is not None:
        within = position + starts < end
        starts, ends = starts[within], ends[within]
    too_long = ends - starts > MAX_LINE_BYTES
    for start, stop in zip(starts[too_long].tolist(), ends[too_long].tolist(), strict=True):
        yield _Long(position + start, data[start:stop], None).finish()
    starts, ends = starts[~too_long], ends[~too_long]
    if not len(starts):
        return
    stops = ends - ((ends > starts) & (array[np.maximum(ends - 1, 0)] == _RETURN))
    # Without the line ends, the lengths of the lines add up to Arrow's offsets.
    edges = np.zeros(len(array) + 1, dtype=np.int8)
    edges[starts] += 1
    edges[stops] -= 1
    kept = array[np.cumsum(edges[:-1], dtype=np.int8).view(bool)]
    offsets = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(stops - starts, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(kept)]
    yield Lines(position + starts, pa.Array.from_buffers(pa.binary(), len(starts), buffers))


class _Long:
    """A line that is too long to hold in memory: hashed and counted."""

    def __init__(self, position: int, data: bytes, place: _Place | None) -> None:
        self.position, self.length, self._raw, self._newlines = position, 0, b"", 0
        self._place = place
        self._sha256 = hashlib.sha256()
        self.add(data)

    def end_in(self, piece: bytes) -> int:
        """Where this line ends in the next piece, or -1."""
        ends = _ends(np.frombuffer(piece, dtype=np.uint8), self._place)
        return int(ends[0]) if len(ends) else -1

    def add(self, data: bytes) -> None:
        if self._place is not None:
            self._place = self._place.after(np.frombuffer(data, dtype=np.uint8))
        self._raw += data[: RAW_BYTES - len(self._raw)]
        self._sha256.update(data)
        self._newlines += data.count(b"\n")
        self.length += len(data)

    def finish(self) -> LongLine:
        return LongLine(self.position, self._raw, self.length, self._sha256.hexdigest(), self._newlines)
