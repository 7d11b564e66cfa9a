"""Reading and writing one HDFS file: every piece under a deadline, every length compared."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from storage.errors import LockstepError, StorageError
from storage.interface import Writer
from storage.local import short_file
from storage.urls import split_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from storage.hdfs import HdfsFileSystem

READ_BUFFER_BYTES = 1 << 22
WRITE_PIECE_BYTES = 1 << 22


class HdfsRaw(io.RawIOBase):
    """A file as `io.BufferedReader` wants it (hdfs-native's own reader breaks there).

    `size` is the length that must be readable: from the NameNode, or the end of a range. An unclosed file reads as
    empty in hdfs-native without an error, and a read past the end is a panic, so both are looked for first.
    """

    def __init__(self, fs: HdfsFileSystem, url: str, size: int) -> None:
        super().__init__()
        self._fs, self._url, self._size = fs, url, size
        self._path = split_url(url)[2]
        self._inner: Any = None
        self._position = 0

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
        length = max(0, min(len(view), self._size - self._position, 2 * READ_BUFFER_BYTES))
        if length:
            view[:length] = self.read_at(self._position, length)
        self._position += length
        return length

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises CorruptionError where the file has fewer."""

        def read(client: Any) -> bytes:
            inner = self._inner
            self._inner = None  # after a failure or a timeout the next attempt opens the file anew
            if inner is None:
                inner = client.read(self._path)
            readable = inner.file_length()
            if offset + length > readable:
                raise short_file(self._url, offset, length, readable)
            data: bytes = inner.read_range(offset, length)
            if len(data) != length:
                raise short_file(self._url, offset, length, offset + len(data))
            self._inner = inner
            return data

        return self._fs.call(read, "read", self._url, deadline_s=self._fs.data_deadline_s)

    def close(self) -> None:
        self._inner = None
        super().close()


class HdfsWriter(Writer):
    """Writes in pieces. After a failure nothing can be written any more: abort, and write anew under another name."""

    def __init__(self, fs: HdfsFileSystem, url: str, inner: Any) -> None:
        self._fs, self._url = fs, url
        self._inner: Any = inner
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        # The caller may reuse a bytearray after write() has returned, so anything mutable is copied.
        piece = data if isinstance(data, bytes) else bytes(data)
        self._open()
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= WRITE_PIECE_BYTES:
            self._flush()
        return len(piece)

    def sync(self) -> None:
        self._flush()
        self._call(lambda inner: inner.hsync(), "sync")

    def close(self) -> None:
        if self._inner is None:
            return
        self._flush()
        self._call(lambda inner: inner.close(), "close")
        self._inner = None
        length = self._fs.stat(self._url).size_bytes
        if length != self._written:
            raise StorageError(
                f"{self._url} has another length than what was written",
                got=f"{length} bytes",
                allowed=f"{self._written} bytes",
                next_step="Find out who else writes there, then run again.",
            )

    def abort(self) -> None:
        self._inner = None
        self._pending.clear()
        self._fs.discard(self._url)

    def _open(self) -> Any:
        if self._inner is None:
            raise StorageError(
                f"{self._url} is closed", got="a write", allowed="an open file", next_step="Create it anew."
            )
        return self._inner

    def _flush(self) -> None:
        self._open()
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        for start in range(0, len(data), WRITE_PIECE_BYTES):
            piece = data[start : start + WRITE_PIECE_BYTES]
            self._call(lambda inner, piece=piece: inner.write(piece), "write")
            self._written += len(piece)

    def _call(self, step: Any, verb: str) -> None:
        inner = self._open()
        try:
            self._fs.once(lambda _client: step(inner), verb, self._url, self._fs.data_deadline_s)
        except LockstepError:
            self._inner = None  # dropped, never closed: a failed file's close waits 15 s for blocks that do not come
            raise
