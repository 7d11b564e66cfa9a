"""TFRecord files without a manifest: finding them, reading their records, inferring their columns."""

from __future__ import annotations

import fnmatch
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.examples.foreign import infer_schema, refuse_sequences
from lockstep.features.shards.read import PIECE_BYTES, Decode
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.tfrecord import FRAMING_BYTES, HEADER_BYTES, masked_crc32c, parse_records
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import basename, parent

MAX_RECORD_BYTES = 2 << 30  # protobuf reads no larger message
SAMPLED_FILES = 8
_GZIP_MAGIC = b"\x1f\x8b\x08"
InferredColumn = tuple[str, str, bool]  # name, dtype, whether it is a list
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """One file: its URL, its path relative to the given URL, its length in bytes."""

    url: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole framed records, uint8; the number of the first one in the file, its offset there, their number."""

    data: NDArray[np.uint8]
    first_record: int
    base_offset: int
    records: int


def find_files(url: str, pattern: str, kind: str = "TFRecord") -> list[ForeignFile]:
    """The files at `url`, sorted by path: the file itself, the files of a directory tree whose names match `pattern`,
    or those that match the last part of `url` if it has `*`, `?` or `[`.

    Skips files and directories whose names begin with `_` or `.`, like Spark, but not partitions (NAME=VALUE), and
    links to directories. Raises NotFoundError if nothing is at `url`, DataError, which says `kind`, if no file there
    matches.
    """
    fs = filesystem(url)
    if _GLOB_CHARACTERS & set(basename(url)) and not fs.exists(url):
        top, pattern, deep = parent(url), basename(url), False
    else:
        status = fs.stat(url)
        if not status.is_dir:
            return [ForeignFile(url, basename(url), status.size_bytes)]
        top, deep = url, True
    found, others = [], 0
    pending = [(top, "")]
    while pending:
        folder, above = pending.pop()
        for entry in fs.list(folder):
            if entry.name.startswith(("_", ".")) and not (entry.is_dir and "=" in entry.name):
                continue
            path = above + entry.name
            if entry.is_dir and deep and not entry.is_special:
                pending.append((entry.url, path + "/"))
            elif not entry.is_dir and fnmatch.fnmatchcase(entry.name, pattern):
                found.append(ForeignFile(entry.url, path, entry.size_bytes))
            else:
                others += 1
    if not found:
        raise DataError(
            f"{url} holds no {kind} files",
            got=f"{others} other files" if others else "no files",
            allowed=f"names that match {pattern}, not beginning with `_` or `.`",
            next_step="Check the path, or give a pattern of names: option pathGlobFilter, flag --pattern.",
        )
    return sorted(found, key=lambda file: file.path)


@contextmanager
def open_unpacked(fs: FileSystem, url: str) -> Iterator[BinaryIO]:
    """A file's bytes; a gzip file, recognised by its first bytes, is unpacked."""
    with fs.open_read(url) as file:
        if not is_gzip(fs, url):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast(BinaryIO, unpacked)


@contextmanager
def files_of_others() -> Iterator[None]:
    """Give a CorruptionError raised in the block the next step for a file without a manifest."""
    try:
        yield
    except CorruptionError as error:
        error.next_step = "Fetch or write that file again, or remove it from the directory."
        raise


def pieces(source: BinaryIO, url: str) -> Iterator[Piece]:
    """The records of an open file, PIECE_BYTES at a time; of checksums, only that of the length at a piece's end.

    Memory: a few times PIECE_BYTES or the largest record. Time: linear in the file, however long its records are.
    Raises CorruptionError naming `url`, record and offset (in the unpacked bytes) for a file that ends within a record,
    and naming `url` for damaged gzip.
    """
    from lockstep.storage.kernels import frames

    def whole(data: bytes) -> tuple[int, int]:
        size, count = frames.whole(np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data))
        return int(size), int(count)

    return _pieces(source, url, whole)


def _pieces(source: BinaryIO, url: str, whole: Callable[[bytes], tuple[int, int]]) -> Iterator[Piece]:
    """Yield what `pieces` yields; `whole` returns how many of the first bytes are whole records, and the number of
    records.
    """
    rest, wanted = b"", PIECE_BYTES
    record = place = 0
    while more := _read(source, url, wanted):
        data = b"".join((rest, *more))
        size, count = whole(data)
        rest = data[size:]
        if size:
            yield Piece(np.frombuffer(data, dtype=np.uint8)[:size], record, place, count)
            record += count
            place += size
        # A record longer than a piece is read completely at once; otherwise each piece would copy it.
        wanted = max(PIECE_BYTES, _missing(rest, url, record, place))
    if rest:
        parse_records(rest, file=url, first_record=record, base_offset=place)  # raises the error


def _read(source: BinaryIO, url: str, wanted: int) -> list[bytes]:
    """Up to `wanted` next bytes, in parts, so that a forged length takes no memory."""
    parts: list[bytes] = []
    try:
        while wanted > 0 and (part := source.read(min(wanted, PIECE_BYTES))):
            parts.append(part)
            wanted -= len(part)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what, allowed = "a gzip file is damaged or cut off", "whole gzip members"
        raise CorruptionError(what, file=url, got=str(error), allowed=allowed) from None
    return parts


def _missing(rest: bytes, url: str, record: int, place: int) -> int:
    """How many bytes are missing from the record at the beginning of `rest`; 0 if its header is incomplete.

    Raises CorruptionError for a length that does not match its checksum or exceeds MAX_RECORD_BYTES.
    """
    header = rest[:HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return 0
    length = int.from_bytes(header[:8], "little")
    if masked_crc32c(header[:8]).to_bytes(4, "little") != header[8:] or length > MAX_RECORD_BYTES:
        parse_records(rest, file=url, first_record=record, base_offset=place)
    return length + FRAMING_BYTES - len(rest)


def _whole_records(data: bytes) -> tuple[int, int]:
    """Do what frames.whole does without Numba, which takes a quarter of a second to import, too long for planning."""
    at = count = 0
    while at + HEADER_BYTES <= len(data):
        end = at + int.from_bytes(data[at : at + 8], "little") + FRAMING_BYTES
        if end > len(data):
            break
        at, count = end, count + 1
    return at, count


def is_gzip(fs: FileSystem, url: str) -> bool:
    """Whether a file is gzip. A TFRecord file may begin with the same three bytes, as the length of its first record,
    but then the checksum of that length follows.
    """
    with fs.open_read(url) as file:
        head = file.read(HEADER_BYTES)
    if not head.startswith(_GZIP_MAGIC):
        return False
    return len(head) < HEADER_BYTES or head[8:] != masked_crc32c(head[:8]).to_bytes(4, "little")


def read_file(fs: FileSystem, url: str, decode: Decode) -> Iterator[pa.RecordBatch]:
    """The records of a whole file as batches that `decode` makes; memory and errors as for `pieces`."""
    with files_of_others(), open_unpacked(fs, url) as source:
        for piece in pieces(source, url):
            yield decode(piece.data, url, piece.first_record, piece.base_offset)


def sample(files: Sequence[ForeignFile], records: int) -> list[bytes]:
    """The first records of up to 8 files, evenly chosen from all; `records` in all, or fewer if there are not so many.

    Raises DataError if the files are empty.
    """
    step = max(1, len(files) // SAMPLED_FILES)
    chosen = files[::step][:SAMPLED_FILES]
    found: list[bytes] = []
    for number, file in enumerate(chosen):
        # Records that a short file lacks are taken from the files after it.
        wanted = -(-(records - len(found)) // (len(chosen) - number))
        with files_of_others(), open_unpacked(filesystem(file.url), file.url) as source:
            found += islice(_records(source, file.url), wanted)
    if not found:
        raise DataError(
            f"no record to infer a schema from in {len(chosen)} of {len(files)} files",
            got="empty files",
            allowed="at least one record",
            next_step="Give the schema: .schema(...).",
        )
    return found


def _records(source: BinaryIO, url: str) -> Iterator[bytes]:
    for piece in _pieces(source, url, _whole_records):
        views = parse_records(piece.data.data, file=url, first_record=piece.first_record, base_offset=piece.base_offset)
        yield from map(bytes, views)


def all_columns(columns: Sequence[InferredColumn], more: Sequence[InferredColumn], where: str) -> list[InferredColumn]:
    """The columns of two samples, by name. Raises DataError for a feature of two types; `where` names `more`'s file."""
    found = {name: (dtype, is_list) for name, dtype, is_list in columns}
    for name, dtype, is_list in more:
        before, was_list = found.get(name, (dtype, False))
        if before != dtype and {before, dtype} != {"string", "bytes"}:
            raise DataError(
                f"feature `{name}` has two types",
                got=f"{dtype} in {where}, {before} in records before",
                allowed="one type in all records",
                next_step="Write those records with one type, or move them to a directory of their own.",
            )
        found[name] = (dtype if before == dtype else "bytes", is_list or was_list)
    return [(name, *found[name]) for name in sorted(found, key=str.encode)]


def infer_columns(files: Sequence[ForeignFile], records: Sequence[bytes]) -> list[tuple[str, str, bool]]:
    """The columns of `records`, a sample of `files`: (name, dtype, is_list) in byte order of the names.

    Raises DataError for a feature of different types, and for records that are not Examples.
    """
    try:
        refuse_sequences(records)
        columns = infer_schema(records)
        if not columns:
            raise DataError(
                "no record has a feature",
                got=f"{len(records)} empty records",
                allowed="a feature or more",
                next_step="Look at what wrote these files.",
            )
        return columns
    except DataError as error:
        raise DataError(
            f"no one schema fits the first records of {files[0].url} and the files after it: {error.what}",
            got=error.got,
            allowed=error.allowed,
            next_step="Give the schema of the columns that you need: .schema(...).",
        ) from None
