"""TFRecord files that no manifest describes: finding them, reading their records, inferring what they hold."""

from __future__ import annotations

import fnmatch
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, cast

import pyarrow as pa

from features.codec.foreign import infer_schema
from features.shard_ranges import PIECE_BYTES, Decode, decoded
from storage.errors import CorruptionError, DataError
from storage.fs import FileSystem, basename, filesystem, parent
from storage.tfrecord import HEADER_BYTES, masked_crc32c, read_records

DATA_GLOB = "*.tfrecord*"
SAMPLE_RECORDS = 1000
MAX_BATCH_RECORDS = 4096
SAMPLED_FILES = 8
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GLOB_CHARACTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """One file: its URL, its path relative to what was asked for, its length in bytes."""

    url: str
    path: str
    bytes: int


def find_files(url: str, pattern: str) -> list[ForeignFile]:
    """The files at `url`, by path: a file itself, the files of a directory tree whose names fit `pattern`, or those
    that the last part of `url` fits where it holds `*`, `?` or `[`.

    Names that begin with `_` or `.` are passed over, as Spark does, directories too. Raises NotFoundError where
    nothing is at `url`, DataError where no file there fits.
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
            if entry.name.startswith(("_", ".")):
                continue
            path = above + entry.name
            if entry.is_dir and deep:
                pending.append((entry.url, path + "/"))
            elif not entry.is_dir and fnmatch.fnmatchcase(entry.name, pattern):
                found.append(ForeignFile(entry.url, path, entry.size_bytes))
            else:
                others += 1
    if not found:
        raise DataError(
            f"{url} holds no TFRecord files",
            got=f"{others} other files" if others else "no files",
            allowed=f"names that fit {pattern}, not beginning with `_` or `.`",
            next_step="Check the path, or say which names: option pathGlobFilter, flag --pattern.",
        )
    return sorted(found, key=lambda file: file.path)


@contextmanager
def open_records(fs: FileSystem, url: str) -> Iterator[Iterator[bytes]]:
    """The records of a file one by one, both checksums checked; a gzip file, told by its first bytes, is unpacked.

    Raises CorruptionError naming file, record and offset (in the unpacked bytes).
    """
    with fs.open_read(url) as file:
        if is_gzip(fs, url):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield records_of(cast(BinaryIO, unpacked), url)
        else:
            yield records_of(file, url)


def records_of(source: BinaryIO, url: str) -> Iterator[bytes]:
    """The records of an open file, unpacked already; damage of what it was packed in is a CorruptionError too."""
    try:
        yield from read_records(source, file=url)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptionError("a gzip file is damaged or cut", file=url, got=str(error)) from None


def is_gzip(fs: FileSystem, url: str) -> bool:
    """Whether a file is gzip. A TFRecord file may begin with the same three bytes, the length of its first record, but
    then the checksum of that length follows.
    """
    with fs.open_read(url) as file:
        head = file.read(HEADER_BYTES)
    if not head.startswith(_GZIP_MAGIC):
        return False
    return len(head) < HEADER_BYTES or head[8:] != masked_crc32c(head[:8]).to_bytes(4, "little")


def read_file(fs: FileSystem, url: str, decode: Decode) -> Iterator[pa.RecordBatch]:
    """The records of a whole file as batches that `decode` makes; memory as for pieces of a shard."""
    first = 0
    with open_records(fs, url) as records:
        for held in _held(records):
            yield decoded(decode, held, url, first)
            first += len(held)


def sample(files: Sequence[ForeignFile], records: int) -> list[bytes]:
    """The first records of up to 8 files that lie evenly among all, `records` of them together where there are so many.

    Raises DataError where the files are empty.
    """
    step = max(1, len(files) // SAMPLED_FILES)
    chosen = files[::step][:SAMPLED_FILES]
    found: list[bytes] = []
    for number, file in enumerate(chosen):
        # What a short file leaves over goes to those after it.
        wanted = -(-(records - len(found)) // (len(chosen) - number))
        with open_records(filesystem(file.url), file.url) as source:
            found += islice(source, wanted)
    if not found:
        raise DataError(
            f"no record to infer a schema from in {len(chosen)} of {len(files)} files",
            got="empty files",
            allowed="at least one record",
            next_step="Give the schema: .schema(...).",
        )
    return found


def infer_columns(files: Sequence[ForeignFile], records: Sequence[bytes]) -> list[tuple[str, str, bool]]:
    """What columns `records`, a sample of `files`, show: (name, dtype, is_list) in byte order of the names.

    Raises DataError for a feature of changing types, and for records that are no Examples.
    """
    try:
        return infer_schema(records)
    except DataError as error:
        raise DataError(
            f"no one schema fits the first records of {files[0].url} and the files after it: {error.what}",
            got=error.got,
            allowed=error.allowed,
            next_step="Give the schema of what you need: .schema(...).",
        ) from None


def _held(records: Iterator[bytes]) -> Iterator[list[memoryview]]:
    held: list[memoryview] = []
    size = 0
    for record in records:
        held.append(memoryview(record))
        size += len(record)
        if size >= PIECE_BYTES or len(held) == MAX_BATCH_RECORDS:
            yield held
            held, size = [], 0
    if held:
        yield held
