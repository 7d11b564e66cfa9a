"""Reading and writing one file over WebHDFS: one stream for consecutive reads, reopened if it breaks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hdfs.util import HdfsError

from lockstep.storage.errors import LockstepError, RetryableStorageError, StorageError, StorageTimeoutError
from lockstep.storage.files.interface import short_file
from lockstep.storage.files.remote import RemoteRaw, RemoteWriter
from lockstep.storage.files.webhdfs_http import OTHER_FORM, RefusedError, checked, host_of, location, path_of

if TYPE_CHECKING:
    from lockstep.storage.files.webhdfs import WebHdfsFileSystem

_AVOIDED_S = 60.0  # how long a failed DataNode is avoided; a stream may also break because it was idle
PIECES_UNDER_WAY = 4


def locate(client: Any, path: str, offset: int, length: int, failed: Collection[str] = ()) -> str:
    """The URL at a DataNode for `length` bytes of a file from `offset`; at none of `failed` ("host:port" of HTTP) if
    another one has the bytes.
    """
    left_out = ",".join(_transfer_addresses(client, path, offset, failed)) if failed else ""
    if left_out:
        try:
            return location(client._locate_open(path, offset=offset, length=length, excludedatanodes=left_out))
        except HdfsError:
            left_out = ""  # no other has them: a failed one may answer by now, or else raises its error
    return location(client._locate_open(path, offset=offset, length=length))


def _transfer_addresses(client: Any, path: str, offset: int, failed: Collection[str]) -> list[str]:
    """ "ip:port" of those among `failed` that have the byte at `offset`."""
    try:
        blocks = client._get_block_locations(path, offset=offset, length=1).json()["LocatedBlocks"]["locatedBlocks"]
        return [
            f"{node['ipAddr']}:{node['xferPort']}"
            for block in blocks
            for node in block["locations"]
            for host in (node["hostName"], node["ipAddr"])
            if f"{host}:{node['infoPort']}" in failed
        ]
    except (HdfsError, *OTHER_FORM):  # without an answer, ask as if none had failed
        return []


class WebHdfsRaw(RemoteRaw):
    """A file to be read.

    A read that begins where the last one ended requests the rest of the file once, and later reads continue from that
    stream; other reads request only their bytes. A stream that breaks (a dead DataNode) is reopened at its position,
    on another replica if there is one.
    """

    def __init__(self, fs: WebHdfsFileSystem, url: str, size: int, begin: int = 0) -> None:
        super().__init__(url, size)
        self._fs = fs
        # An abandoned attempt still runs with the stream that it took, and must not keep one.
        self._lock = threading.Lock()
        self._attempt = 0
        self._kept: tuple[Any, int, str] | None = None  # a stream, its position, its DataNode
        self._reads_from = ""  # the DataNode of the newest attempt; one that is still here later has failed
        self._failed: dict[str, float] = {}  # and when
        self._last_end = begin  # a file is most often read from its start to its end

    def read_at(self, offset: int, length: int) -> bytes:
        try:
            data = self._fs.calls.call_data(lambda client: self._read(client, offset, length), "read", self._url)
        except StorageError:
            size = self._fs.stat(self._url).size_bytes  # for a range beyond the end, servers report an internal error
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
            kept, self._kept = self._kept, None  # after a failure or a timeout the next attempt opens the file again
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
        """Keep `new` if its attempt is the newest and the file is open; close the other stream."""
        with self._lock:
            if new is None or (attempt == self._attempt and not self.closed):
                new, self._kept = self._kept, new
        if new is not None:
            new[0].close()


def open_at(client: Any, where: str, length: int) -> Any:
    """The answer of a DataNode whose raw body is `length` bytes of the file, or fewer at its end.

    Raises RefusedError for any other body: a longer one, a compressed one, or one without a length, such as a page of a
    proxy. A DataNode always sends the length.
    """
    answer = checked(client._request("GET", url=where, stream=True))
    length_sent = answer.headers.get("Content-Length", "an unknown number of")
    form = answer.headers.get("Content-Encoding") or answer.headers.get("Transfer-Encoding") or "identity"
    if form != "identity" or not length_sent.isdecimal() or int(length_sent) > length:
        answer.close()
        text = f"{length_sent} bytes ({form}) for a request of {length}"
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


class WebHdfsWriter(RemoteWriter):
    """Appends to a file that `create` has made empty.

    A broken connection leaves a closed, shorter file on HDFS, so `close` compares the length, and important files are
    written under a temporary name. `sync` ends the request: the DataNodes have the bytes, but not on their disks.
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
    """One APPEND request, whose body another thread sends while the writer still adds pieces, a few at a time.

    It ends by itself if no piece comes within the deadline: a writer that was dropped would otherwise hold thread,
    connection and lease forever, and one that is only slow continues with another request.
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
        """Add a piece as soon as there is room for it; False if the request has ended by itself."""
        with self._changed:
            if not self._ended:
                self._wait(lambda: self._ended or len(self._pieces) < PIECES_UNDER_WAY, deadline_s)
            if self._ended:
                return False
            self._pieces.append(piece)
            self._changed.notify_all()
            return True

    def finish(self, deadline_s: float) -> None:
        """End the body, and return when the DataNode has confirmed all of it."""
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
        """Abandon the body: the connection is closed in the middle."""
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
            return  # the writer no longer waits
        except LockstepError as caught:
            outcome = caught
        finally:
            with self._changed:
                self._error, self._done = outcome, True
                self._changed.notify_all()


class _Cancelled(Exception):
    """Ends the thread of an abandoned request."""
