"""Reading and writing one file of a remote backend: in pieces, every length compared."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.storage.errors import LockstepError, StorageError
from lockstep.storage.files.interface import FileSystem, Writer

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BUFFER_BYTES = 1 << 22
READ_PIECE_BYTES = 1 << 23  # one call's worth of data: small enough to come well within a deadline at 1 MB/s


class RemoteRaw(io.RawIOBase):
    """A file as `io.BufferedReader` wants it; `size` is the length that must be readable."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__()
        self._url, self._size = url, size
        self._position = 0

    @abstractmethod
    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises CorruptionError where the file has fewer."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset} in {self._url}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._next(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        # `read()` of a buffered reader comes here; what io itself would do is to ask for 8 KiB at a time.
        pieces = list(iter(lambda: self._next(READ_PIECE_BYTES), b""))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _next(self, most: int) -> bytes:
        length = max(0, min(most, self._size - self._position, READ_PIECE_BYTES))
        data = self.read_at(self._position, length) if length else b""
        self._position += length
        return data


class RemoteRanges:
    """An open remote file that is read by ranges of any length."""

    def __init__(self, raw: RemoteRaw) -> None:
        self._raw = raw

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises as RemoteRaw.read_at does."""
        stop = offset + length
        starts = range(offset, stop, READ_PIECE_BYTES)
        pieces = [self._raw.read_at(start, min(READ_PIECE_BYTES, stop - start)) for start in starts]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Let go of the stream."""
        self._raw.close()


class RemoteWriter(Writer):
    """Writes in pieces of `piece_bytes`. After a failure nothing can be written: abort, and write anew under another
    name.
    """

    piece_bytes: ClassVar[int]

    def __init__(self, fs: FileSystem, url: str) -> None:
        self._target, self._url = fs, url
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._open = True

    @abstractmethod
    def _send(self, piece: bytes) -> None:
        """Send at most `piece_bytes` bytes."""

    @abstractmethod
    def _sync(self) -> None:
        """What `sync` promises, for all that was sent."""

    @abstractmethod
    def _end(self) -> None:
        """Finish the file."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of what the file is written through, without a word to the server; never raises."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._check_open()
        # The caller may reuse a bytearray after write() has returned, so anything mutable is copied.
        piece = data if isinstance(data, bytes) else bytes(data)
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= self.piece_bytes:
            self._flush()
        return len(piece)

    def sync(self) -> None:
        self._flush()
        self._guarded(self._sync)

    def close(self) -> None:
        if not self._open:
            return
        self._flush()
        self._guarded(self._end)
        self._give_up()
        length = self._target.stat(self._url).size_bytes
        if length != self._written:
            raise StorageError(
                f"{self._url} has another length than what was written",
                got=f"{length} bytes",
                allowed=f"{self._written} bytes",
                next_step="Find out who else writes there, then run again.",
            )

    def abort(self) -> None:
        self._give_up()
        self._pending.clear()
        self._target.discard(self._url)

    def _check_open(self) -> None:
        if not self._open:
            raise StorageError(
                f"{self._url} is closed", got="a write", allowed="an open file", next_step="Create it anew."
            )

    def _flush(self) -> None:
        self._check_open()
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        for start in range(0, len(data), self.piece_bytes):
            piece = data[start : start + self.piece_bytes]
            self._guarded(partial(self._send, piece))
            self._written += len(piece)

    def _guarded(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except LockstepError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._open = False
        self._drop()
