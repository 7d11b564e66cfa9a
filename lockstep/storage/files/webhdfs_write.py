"""Writing one file over WebHDFS: a request whose body is sent while it is still being written."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lockstep.storage.errors import LockstepError, RetryableStorageError, StorageTimeoutError
from lockstep.storage.files.remote_streams import RemoteWriter

if TYPE_CHECKING:
    from lockstep.storage.files.webhdfs import WebHdfsFileSystem

PIECES_UNDER_WAY = 4


class WebHdfsWriter(RemoteWriter):
    """Appends to a file that `create` has made empty.

    A connection that breaks leaves a closed, shorter file on HDFS, so `close` compares the length, and what matters
    is written under a temporary name. `sync` ends the request: the bytes are with the DataNodes, not on their disks.
    """

    piece_bytes = 1 << 20

    def __init__(self, fs: WebHdfsFileSystem, url: str) -> None:
        super().__init__(fs, url)
        self._fs = fs
        self._request: _Append | None = None

    def _send(self, piece: bytes) -> None:
        while self._request is None or not self._request.put(piece, self._fs.data_deadline_s):
            self._sync()
            self._request = _Append(self._fs, self._url)

    def _sync(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.finish(self._fs.data_deadline_s)

    def _end(self) -> None:
        self._sync()

    def _drop(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.cancel()


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
                idle_s = self._fs.data_deadline_s
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
