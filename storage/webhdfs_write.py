"""Writing one file over WebHDFS: a request whose body is sent while it is still being written."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from storage.errors import LockstepError, RetryableStorageError, StorageError, StorageTimeoutError
from storage.interface import Writer

if TYPE_CHECKING:
    from storage.webhdfs import WebHdfsFileSystem

WRITE_PIECE_BYTES = 1 << 20
PIECES_UNDER_WAY = 4


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
        self._finish()

    def _finish(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._guarded(lambda: request.finish(self._fs.calls.data_deadline_s))

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
        for start in range(0, len(data), WRITE_PIECE_BYTES):
            piece = data[start : start + WRITE_PIECE_BYTES]
            while self._request is None or not self._guarded(
                partial(self._request.put, piece, self._fs.calls.data_deadline_s)
            ):
                self._finish()
                self._request = self._guarded(lambda: _Append(self._fs, self._url))
            self._written += len(piece)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except LockstepError:
            self._open = False
            raise


class _Append:
    """One APPEND, whose body another thread sends while it is still being handed over, a few pieces at a time.

    It ends by itself where nothing comes for the deadline of a piece: a writer that was dropped without an end would
    keep thread, connection and lease for ever, and one that is only slow goes on with another request.
    """

    def __init__(self, fs: WebHdfsFileSystem, url: str) -> None:
        self._fs, self._url = fs, url
        self._changed = threading.Condition()
        self._pieces: deque[bytes] = deque()
        self._ended = self._cancelled = self._done = False
        self._error: LockstepError | None = None
        where = fs.locate_append(url)
        threading.Thread(target=self._send, args=(where,), name="webhdfs-append", daemon=True).start()

    def put(self, piece: bytes, deadline_s: float) -> bool:
        """Hand over a piece as soon as there is room for it; False where the request has ended by itself."""
        with self._changed:
            if not self._ended:
                self._wait(lambda: self._ended or len(self._pieces) < PIECES_UNDER_WAY, deadline_s)
            if self._ended:
                return False
            self._pieces.append(piece)
            self._changed.notify_all()
            return True

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
                    self._cancelled = True
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
            f"cannot write {self._url}: its DataNode took nothing within {deadline_s:.3g} s",
            got="nothing",
            allowed="an answer",
            next_step=f"Check that {self._fs.calls.whom} and its DataNodes are alive and not overloaded.",
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
                idle_s = self._fs.calls.data_deadline_s
                if not self._changed.wait_for(lambda: self._pieces or self._ended or self._cancelled, idle_s):
                    self._ended = True
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
            self._fs.calls.send("POST", where, self._body(), "write", self._url)
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
