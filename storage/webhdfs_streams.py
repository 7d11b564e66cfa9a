"""Reading and writing one file over WebHDFS: a stream where reads follow each other, a stream for what is written."""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from storage.errors import LockstepError, RetryableStorageError, StorageError, StorageTimeoutError
from storage.interface import Writer
from storage.local import short_file
from storage.webhdfs_client import checked, location

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from storage.webhdfs import WebHdfsFileSystem

READ_BUFFER_BYTES = 1 << 22
WRITE_PIECE_BYTES = 1 << 20
PIECES_UNDER_WAY = 4


class WebHdfsRaw(io.RawIOBase):
    """A file as `io.BufferedReader` wants it; `size` is the length that must be readable.

    Where a read begins at the end of the one before, the rest of the file is asked for once and read on from; other
    reads ask for just their bytes. A stream that breaks (a dead DataNode) is opened anew at the place it came to.
    """

    def __init__(self, fs: WebHdfsFileSystem, url: str, size: int, begin: int = 0) -> None:
        super().__init__()
        self._fs, self._url, self._size = fs, url, size
        self._stream: Any = None
        self._stream_at = -1
        self._last_end = begin  # a file is most often read from its start to its end
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

    def readall(self) -> bytes:
        # What RawIOBase does for `read()` of a buffered reader is to ask for 8 KiB at a time.
        pieces = []
        while self._position < self._size:
            pieces.append(self.read_at(self._position, min(self._size - self._position, 2 * READ_BUFFER_BYTES)))
            self._position += len(pieces[-1])
        return b"".join(pieces)

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises CorruptionError where the file has fewer."""
        try:
            data = self._fs.call_data(lambda client: self._read(client, offset, length), "read", self._url)
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
        self._drop()
        super().close()

    def _read(self, client: Any, offset: int, length: int) -> bytes:
        stream, at = self._stream, self._stream_at
        self._stream = None  # after a failure or a time-out the next attempt opens the file anew
        if stream is not None and at != offset:
            stream.close()
            stream = None
        if stream is None:
            stream = open_at(client, self._url, offset, self._size - offset if offset == self._last_end else length)
        data = _exactly(stream, length)
        if len(data) == length and offset + length < self._size:
            self._stream, self._stream_at = stream, offset + length
        else:
            stream.close()
        return data

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def open_at(client: Any, url: str, offset: int, length: int) -> Any:
    """The answer whose raw body is `length` bytes of the file from `offset`, or fewer where it ends before."""
    from storage.webhdfs import path_of

    where = location(client._locate_open(path_of(url), offset=offset, length=length))
    return checked(client._request("GET", url=where, stream=True))


def _exactly(stream: Any, length: int) -> bytes:
    pieces, got = [], 0
    while got < length:
        piece = stream.raw.read(length - got, decode_content=False)
        if not piece:
            break
        pieces.append(piece)
        got += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class WebHdfsWriter(Writer):
    """Appends to a file that `create` has made empty; after a failure nothing can be written: abort, and write anew.

    A connection that breaks leaves a closed, shorter file on HDFS, so `close` compares the length, and what matters
    is written under a temporary name. `sync` ends the request: the bytes are with the DataNodes, not on their disks.
    """

    def __init__(self, fs: WebHdfsFileSystem, url: str) -> None:
        self._fs, self._url = fs, url
        self._request: _Append | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if not self._open:
            raise StorageError(
                f"{self._url} is closed", got="a write", allowed="an open file", next_step="Create it anew."
            )
        # The caller may reuse a bytearray after write() has returned, so anything mutable is copied.
        piece = data if isinstance(data, bytes) else bytes(data)
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= WRITE_PIECE_BYTES:
            self._flush()
        return len(piece)

    def sync(self) -> None:
        self._flush()
        request, self._request = self._request, None
        if request is not None:
            self._guarded(lambda: request.finish(self._fs.data_deadline_s))

    def close(self) -> None:
        if not self._open:
            return
        self.sync()
        self._open = False
        length = self._fs.stat(self._url).size_bytes
        if length != self._written:
            raise StorageError(
                f"{self._url} has another length than what was written",
                got=f"{length} bytes",
                allowed=f"{self._written} bytes",
                next_step="Find out who else writes there, then run again.",
            )

    def abort(self) -> None:
        self._open = False
        self._pending.clear()
        if self._request is not None:
            self._request.cancel()
            self._request = None
        self._fs.discard(self._url)

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if not data:
            return
        if self._request is None:
            self._request = self._guarded(lambda: _Append(self._fs, self._url))
        request = self._request
        for start in range(0, len(data), WRITE_PIECE_BYTES):
            piece = data[start : start + WRITE_PIECE_BYTES]
            self._guarded(partial(request.put, piece, self._fs.data_deadline_s))
            self._written += len(piece)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except LockstepError:
            self._open = False
            raise


class _Append:
    """One APPEND, whose body another thread sends while it is still being handed over, a few pieces at a time."""

    def __init__(self, fs: WebHdfsFileSystem, url: str) -> None:
        self._fs, self._url = fs, url
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._ended = self._cancelled = self._done = False
        self._error: LockstepError | None = None
        where = fs.locate_append(url)
        threading.Thread(target=self._send, args=(where,), name="webhdfs-append", daemon=True).start()

    def put(self, piece: bytes, deadline_s: float) -> None:
        """Hand over a piece as soon as there is room for it."""
        with self._changed:
            self._wait(lambda: len(self._pieces) < PIECES_UNDER_WAY, deadline_s)
            self._pieces.append(piece)
            self._changed.notify_all()

    def finish(self, deadline_s: float) -> None:
        """End the body, and return when the DataNode has said that all of it is there."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            end, pieces = time.monotonic() + deadline_s, len(self._pieces)
            while not self._done:  # the deadline is for a piece, not for all that is still to be sent
                self._changed.wait(max(0.0, end - time.monotonic()))
                if len(self._pieces) < pieces:
                    end, pieces = time.monotonic() + deadline_s, len(self._pieces)
                elif time.monotonic() >= end and not self._done:
                    raise self._too_late(deadline_s)
            if self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Give the body up: the connection is closed in its middle."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], deadline_s: float) -> None:
        if not self._changed.wait_for(lambda: self._done or ready(), deadline_s):
            raise self._too_late(deadline_s)
        if self._done:
            raise self._error or self._unanswered()

    def _too_late(self, deadline_s: float) -> StorageTimeoutError:
        return StorageTimeoutError(
            f"cannot write {self._url}: {self._fs.whom_data} took nothing within {deadline_s:.3g} s",
            got="nothing",
            allowed="an answer",
            next_step=f"Check that {self._fs.whom} and its DataNodes are alive and not overloaded.",
        )

    def _unanswered(self) -> RetryableStorageError:
        return RetryableStorageError(
            f"cannot write {self._url}: the DataNode ended the request before its body",
            got="an early end",
            allowed="an answer to the whole body",
            next_step="Run again; see the DataNodes' logs.",
        )

    def _body(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended or self._cancelled)
                if self._cancelled:
                    raise _Cancelled
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
                self._changed.notify_all()
            yield piece

    def _send(self, where: str) -> None:
        outcome: LockstepError | None = self._unanswered()
        try:
            self._fs.send("POST", where, self._body(), "write", self._url)
            outcome = None
        except _Cancelled:
            return  # nobody waits for it
        except LockstepError as caught:
            outcome = caught
        finally:
            with self._changed:
                self._error, self._done = outcome, True
                self._changed.notify_all()


class _Cancelled(Exception):
    """Ends the thread of a request that was given up."""
