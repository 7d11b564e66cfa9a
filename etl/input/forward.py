"""A file read forwards at chosen positions: what lies in between is skipped by a seek, or unpacked and let go."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from etl.input.unpack import PLAIN, unpacked
from lockstep.storage.errors import DataError
from lockstep.storage.fs import filesystem

CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 4 << 10


class Forward:
    """Positions count unpacked bytes and must never fall. Raises DataError where a packed file is damaged."""

    def __init__(self, url: str, codec: str) -> None:
        self._file = filesystem(url).open_read(url)
        self._chunks: Iterator[bytes] | None = None
        if codec != PLAIN:
            self._chunks = unpacked(url, self._file, codec, CHUNK_BYTES)
        self._base, self._buffer = 0, b""
        self._ahead = _FIRST_BYTES

    def at(self, position: int, size: int) -> bytes:
        """`size` bytes from `position`; fewer only where the file ends."""
        start = position - self._base
        if start < 0:
            raise DataError(
                "a file that is read forwards was asked for bytes that were let go",
                got=f"position {position}",
                allowed=f"{self._base} or later",
                next_step="Run the job again; if it fails again, report the archive's listing.",
            )
        if start + size > len(self._buffer):
            self._fill(position, size)
            start = position - self._base
        return self._buffer[start : start + size]

    def _fill(self, position: int, size: int) -> None:
        """Have at least `size` bytes from `position` on in the buffer, and none before it."""
        end = self._base + len(self._buffer)
        pieces = [self._buffer[position - self._base :]]
        if self._chunks is None:
            if position > end:
                self._file.seek(position)
                self._ahead = _FIRST_BYTES  # who skips once will skip again: headers alone are looked for
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
