"""Decompression of gzip, bzip2 and zstd, also of several members or frames, in bounded memory."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import pyarrow as pa

from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem

PLAIN = "none"
ZIP = "zip"
SUFFIXES = {"gzip": ".gz", "bzip2": ".bz2", "zstd": ".zst"}
MAGIC_BYTES = 10
_GZIP = b"\x1f\x8b"
_BZIP2, _BZIP2_BLOCKS = b"BZh", (bytes.fromhex("314159265359"), bytes.fromhex("177245385090"))  # pi, or nothing packed
_ZSTD, _ZSTD_SKIPPABLE = bytes.fromhex("28b52ffd"), bytes.fromhex("2a4d18")
_OTHERS = {
    bytes.fromhex("fd377a585a00"): "xz",
    b"PK\x03\x04": ZIP,
    bytes.fromhex("04224d18"): "lz4",
    b"\x1f\x9d": "compress (.Z)",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_ARROW = {"bzip2": "bz2", "zstd": "zstd"}
CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 4 << 10


def codec_of(head: bytes) -> str:
    """The codec of a file that begins with `head` (MAGIC_BYTES, or a shorter file): gzip, bzip2, zstd or none."""
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_BZIP2) and head[4:10] in _BZIP2_BLOCKS:
        return "bzip2"
    if head.startswith(_ZSTD) or (head[1:4] == _ZSTD_SKIPPABLE and head[:1] and head[0] >> 4 == 5):
        return "zstd"
    return PLAIN


def foreign_codec(head: bytes) -> str | None:
    """The name of an unsupported compression of a file that begins with `head`, else None."""
    return next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)


def unpacked(url: str, file: BinaryIO, codec: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of an open file, at most `chunk_bytes` at a time.

    Raises DataError naming the file and the position for a stream that is cut, damaged or followed by other bytes.
    """
    done = 0
    with _stream(file, codec) as stream:
        while True:
            try:
                data = stream.read(chunk_bytes)
            except (EOFError, OSError, zlib.error) as error:
                raise damaged(url, codec, done, error) from None
            if not data:
                return
            done += len(data)
            yield data


def damaged(url: str, codec: str, done: int, error: Exception) -> DataError:
    """The error for a packed file that is cut or damaged after `done` decompressed bytes."""
    return DataError(
        f"input {url} is a damaged {codec} file",
        got=f"{str(error) or type(error).__name__}, after {done} decompressed bytes",
        allowed=f"a whole {codec} stream",
        next_step="Fetch the file again; compare its length and digest with the origin's.",
    )


def _stream(file: BinaryIO, codec: str) -> BinaryIO:
    if codec == "gzip":
        # a GzipFile reads like a BinaryIO, but is not declared as one
        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    # Python's bz2 takes anything after the first stream for padding; Arrow's refuses it.
    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), _ARROW[codec])


class Forward:
    """A file that is read forwards; positions count unpacked bytes. Raises DataError if a packed file is damaged."""

    def __init__(self, url: str, codec: str) -> None:
        self._file = filesystem(url).open_read(url)
        self._chunks: Iterator[bytes] | None = None
        if codec != PLAIN:
            self._chunks = unpacked(url, self._file, codec, CHUNK_BYTES)
        self._base, self._buffer = 0, b""
        self._ahead = _FIRST_BYTES

    def at(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position`; fewer only at the end of the file."""
        start = position - self._base
        if start < 0:
            raise DataError(
                "a file that is read forwards was asked for bytes that were dropped",
                got=f"position {position}",
                allowed=f"{self._base} or later",
                next_step="Run the job again; if it fails again, report the archive's listing.",
            )
        if start + size > len(self._buffer):
            self._fill(position, size)
            start = position - self._base
        return self._buffer[start : start + size]

    def _fill(self, position: int, size: int) -> None:
        """Read until the buffer has at least `size` bytes from `position`; drop those before."""
        end = self._base + len(self._buffer)
        pieces = [self._buffer[position - self._base :]]
        if self._chunks is None:
            if position > end:
                self._file.seek(position)
                self._ahead = _FIRST_BYTES  # after one skip expect more: only headers are read
            else:
                self._ahead = min(2 * self._ahead, CHUNK_BYTES)
            pieces.append(self._file.read(max(size - len(pieces[0]), self._ahead)))
        else:
            while end < position + size and (chunk := next(self._chunks, b"")):
                pieces.append(chunk[max(position - end, 0) :])
                end += len(chunk)
        self._base, self._buffer = position, b"".join(pieces)

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
