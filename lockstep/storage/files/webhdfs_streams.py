"""Reading one file over WebHDFS: a stream where reads follow each other, opened anew where it breaks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.storage.errors import StorageError
from lockstep.storage.files.ranges import short_file
from lockstep.storage.files.remote_streams import RemoteRaw
from lockstep.storage.files.webhdfs_client import RefusedError, checked, host_of
from lockstep.storage.files.webhdfs_http import path_of
from lockstep.storage.files.webhdfs_replicas import locate

if TYPE_CHECKING:
    from lockstep.storage.files.webhdfs import WebHdfsFileSystem

_AVOIDED_S = 60.0  # for so long a DataNode that failed is left out; a stream may also break for want of use


class WebHdfsRaw(RemoteRaw):
    """A file to be read.

    Where a read begins at the end of the one before, the rest of the file is asked for once and read on from; other
    reads ask for just their bytes. A stream that breaks (a dead DataNode) is opened anew at the place it came to, on
    another replica where there is one.
    """

    def __init__(self, fs: WebHdfsFileSystem, url: str, size: int, begin: int = 0) -> None:
        super().__init__(url, size)
        self._fs = fs
        # An attempt that was given up still runs: it has the stream that it took, and may not keep one any more.
        self._lock = threading.Lock()
        self._attempt = 0
        self._kept: tuple[Any, int, str] | None = None  # a stream, the place it came to, its DataNode
        self._reads_from = ""  # the DataNode that the newest attempt reads from; what stays here has failed
        self._failed: dict[str, float] = {}  # and when
        self._last_end = begin  # a file is most often read from its start to its end

    def read_at(self, offset: int, length: int) -> bytes:
        try:
            data = self._fs.calls.call_data(lambda client: self._read(client, offset, length), "read", self._url)
        except StorageError:
            size = self._fs.stat(self._url).size_bytes  # the server calls a range behind the end a fault of its own
            if offset + length > size:
                raise short_file(self._url, offset, length, size) from None
            raise
        if len(data) != length:
            raise short_file(self._url, offset, length, offset + len(data))
        self._last_end = offset + length
        return data

    def close(self) -> None:
        super().close()
        self._keep(None, -1)

    def _read(self, client: Any, offset: int, length: int) -> bytes:
        with self._lock:
            self._attempt += 1
            attempt = self._attempt
            kept, self._kept = self._kept, None  # after a failure or a time-out the next attempt opens the file anew
            failed = self._failed_lately()
        if kept is not None and kept[1] == offset:
            stream, _, node = kept
            self._read_from(node, attempt)
        else:
            if kept is not None:
                kept[0].close()
            size = self._size - offset if offset == self._last_end else length
            where = locate(client, path_of(self._url), offset, size, failed)
            node = urlsplit(where).netloc
            self._read_from(node, attempt)
            stream = open_at(client, where, size)
        data = _exactly(stream, length)
        self._read_from("", attempt)
        if len(data) == length and offset + length < self._size:
            self._keep((stream, offset + length, node), attempt)
        else:
            stream.close()
        return data

    def _read_from(self, node: str, attempt: int) -> None:
        with self._lock:
            if attempt == self._attempt:
                self._reads_from = node

    def _failed_lately(self) -> list[str]:
        """DataNodes to leave out now; the lock is held."""
        now = time.monotonic()
        if self._reads_from:
            self._failed[self._reads_from] = now
            self._reads_from = ""
        return [node for node, failed_at in self._failed.items() if now - failed_at < _AVOIDED_S]

    def _keep(self, new: tuple[Any, int, str] | None, attempt: int) -> None:
        """Keep `new` if its attempt is the newest and the file is open; what is not kept is closed."""
        with self._lock:
            if new is None or (attempt == self._attempt and not self.closed):
                new, self._kept = self._kept, new
        if new is not None:
            new[0].close()


def open_at(client: Any, where: str, length: int) -> Any:
    """The answer of a DataNode whose raw body is `length` bytes of the file, or fewer where it ends before.

    Raises RefusedError for a body that cannot be that: a longer one, a packed one, or one of untold length, as any page
    of a proxy may be. A DataNode always tells the length of what lies in the file.
    """
    answer = checked(client._request("GET", url=where, stream=True))
    told = answer.headers.get("Content-Length", "an untold number of")
    form = answer.headers.get("Content-Encoding") or answer.headers.get("Transfer-Encoding") or "identity"
    if form != "identity" or not told.isdecimal() or int(told) > length:
        answer.close()
        text = f"{told} bytes ({form}) for {length} that were asked for"
        raise RefusedError("", text, answer.status_code, host_of(answer))
    return answer


def _exactly(stream: Any, length: int) -> bytes:
    pieces, got = [], 0
    while got < length:
        piece = stream.raw.read(length - got, decode_content=False)
        if not piece:
            break
        pieces.append(piece)
        got += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
