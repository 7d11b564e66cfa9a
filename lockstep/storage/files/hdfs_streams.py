"""One HDFS file by hdfs-native: every piece under a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.storage.files.ranges import short_file
from lockstep.storage.files.remote_streams import RemoteRaw, RemoteWriter
from lockstep.storage.urls import split_url

if TYPE_CHECKING:
    from lockstep.storage.files.hdfs import HdfsFileSystem


_FIRST_S = 15.0
_BYTES_PER_S = 1 << 20


class HdfsRaw(RemoteRaw):
    """A file to be read (hdfs-native's own reader breaks inside `io.BufferedReader`).

    An unclosed file reads as empty in hdfs-native without an error, and a read past the end is a panic, so both are
    looked for first.
    """

    def __init__(self, fs: HdfsFileSystem, url: str, size: int) -> None:
        super().__init__(url, size)
        self._fs = fs
        self._path = split_url(url)[2]
        self._inner: Any = None

    def read_at(self, offset: int, length: int) -> bytes:
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


class HdfsWriter(RemoteWriter):
    """A new file. A failed one is dropped and never closed: its close would wait 15 s for blocks that do not come."""

    piece_bytes = 1 << 22

    def __init__(self, fs: HdfsFileSystem, url: str, inner: Any) -> None:
        super().__init__(fs, url)
        self._fs, self._inner = fs, inner

    def _send(self, piece: bytes) -> None:
        self._once(lambda inner: inner.write(piece), "write")

    def _sync(self) -> None:
        self._once(lambda inner: inner.hsync(), "sync")

    def _end(self) -> None:
        self._once(lambda inner: inner.close(), "close")

    def _drop(self) -> None:
        self._inner = None

    def _once(self, step: Callable[[Any], Any], verb: str) -> None:
        inner = self._inner
        # A pipeline whose second DataNode is dead, or whose first one is frozen, hangs without an error: what has sent
        # little need not wait for as long as what may have much to bring to the disks.
        limit_s = min(self._fs.data_deadline_s, _FIRST_S + self._written / _BYTES_PER_S)
        self._fs.once(lambda _client: step(inner), verb, self._url, limit_s)
