"""What both HDFS backends share: errors, reading and writing in pieces, renames that survive a lost answer."""

from __future__ import annotations

import io
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from lockstep.storage.errors import ExistsError, LockstepError, NotFoundError, RetryableStorageError, StorageError
from lockstep.storage.files.deadlines import with_retries
from lockstep.storage.files.interface import FileStat, FileSystem, RangeFile, Writer, check_range, short_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

RETRYABLE_JAVA = ("RetriableException", "SafeModeException", "StandbyException", "NotReplicatedYetException")


_SECRET = re.compile(r"(delegation|user\.name|doas)=[^&\s'\")]+")
READ_BUFFER_BYTES = 1 << 22
READ_PIECE_BYTES = 1 << 23  # of one call: small enough to arrive well within a deadline at 1 MB/s


def without_secrets(text: str) -> str:
    """An error's text whose URLs name no user and no token."""
    return _SECRET.sub(r"\1=...", text)


def erasure_coded(what: str, text: str) -> StorageError:
    """The error for a new file in an erasure-coded folder."""
    return StorageError(
        f"{what}: its folder is erasure-coded, and such files can be neither synced nor continued",
        got=text,
        allowed="a folder of replicated files",
        next_step="Choose another output, or run `hdfs ec -setPolicy -replicate -path FOLDER` for a folder in it.",
    )


def not_there(what: str, verb: str, text: str) -> LockstepError:
    """A missing path; a file being written can be written again under another name."""
    if verb in ("write", "sync", "close"):
        return lost_by_writer(what, text)
    return NotFoundError(
        f"{what}: not there", got=text, allowed="an existing path", next_step="Check the path and its host."
    )


def lost_by_writer(what: str, text: str) -> RetryableStorageError:
    """A file being written that has disappeared, or belongs to another writer now."""
    return RetryableStorageError(
        f"{what}: the file was deleted, renamed or taken over by another writer",
        got=text,
        allowed="a file that only this writer changes",
        next_step="Look for another run or a cleaning job at work there, then run again.",
    )


def below_a_file(what: str, verb: str, text: str) -> LockstepError:
    """The error for a path whose parent is a file."""
    if verb in ("create", "make"):
        return StorageError(what, got=text, allowed="directories above it", next_step="Check the path.")
    return NotFoundError(f"{what}: not there", got=text, allowed="an existing path", next_step="Check the path.")


def taken(what: str, text: str) -> ExistsError:
    """A name that must be free and is taken."""
    return ExistsError(
        f"{what}: the name is taken",
        got=text,
        allowed="a name that is free",
        next_step="Choose another name, or delete the existing one.",
    )


def not_in_service(what: str, text: str, whom: str) -> RetryableStorageError:
    """A temporary state of HDFS, such as safe mode."""
    return RetryableStorageError(what, got=text, allowed="an HDFS in service", next_step=check(whom))


def no_ticket(what: str, text: str) -> StorageError:
    """The error for Kerberos without a valid ticket."""
    return StorageError(
        f"{what}: Kerberos refused",
        got=text,
        allowed="a valid ticket, a keytab in KRB5_CLIENT_KTNAME, or a token in HADOOP_TOKEN_FILE_LOCATION",
        next_step="Run kinit; for a job that outlives its ticket see docs/sites.md.",
    )


def check(whom: str) -> str:
    """The next step if `whom` does not serve."""
    return f"Check that {whom} runs, has left safe mode and has live DataNodes (`hdfs dfsadmin -report`)."


class RemoteRaw(io.RawIOBase):
    """A raw file for `io.BufferedReader`; `size` is the length that must be readable."""

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
        # `read()` of a buffered reader calls this; io's own version would ask for 8 KiB at a time.
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
        """Close the stream."""
        self._raw.close()


class RemoteWriter(Writer):
    """Writes in pieces of `piece_bytes`. After a failure no more can be written: abort, and write again under another
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
        """Make everything sent so far as durable as `sync` promises."""

    @abstractmethod
    def _end(self) -> None:
        """Finish the file."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the connection without informing the server; never raises."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._check_open()
        # The caller may reuse a bytearray after write() has returned, so mutable data are copied.
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
                f"{self._url} does not have the length that was written",
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
                f"{self._url} is closed", got="a write", allowed="an open file", next_step="Create the file again."
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


class RemoteFileSystem(FileSystem):
    """Attributes: `whom` for errors, `call_deadline_s` and `data_deadline_s` for one attempt at the NameNode and at
    data, `give_up_s` for all attempts of one call, in seconds.
    """

    call_deadline_s: float
    data_deadline_s: float
    give_up_s: float

    @abstractmethod
    def raw(self, url: str, size: int, begin: int = 0) -> RemoteRaw:
        """A file whose first `size` bytes must be readable, most likely read from `begin` on."""

    @abstractmethod
    def stat_once(self, url: str, deadline_s: float) -> FileStat:
        """Call `stat` with one attempt."""

    def open_read(self, url: str) -> BinaryIO:
        return BufferedReader(self.raw(url, self._file(url).size_bytes), READ_BUFFER_BYTES)

    def read_range(self, url: str, offset: int, length: int) -> bytes:
        check_range(url, offset, length)
        with self.raw(url, offset + length, offset) as raw:
            pieces = []
            for start in range(offset, offset + length, READ_PIECE_BYTES):
                pieces.append(raw.read_at(start, min(READ_PIECE_BYTES, offset + length - start)))
            if not length and offset > (size := self._file(url).size_bytes):
                raise short_file(url, offset, 0, size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def open_ranges(self, url: str, size_bytes: int) -> RangeFile:
        return RemoteRanges(self.raw(url, size_bytes, -1))

    def rename_settled(
        self,
        src: str,
        dst: str,
        *,
        replace: bool,
        rename: Callable[[float], None],
        earlier_may_have_happened: Callable[[int], bool],
    ) -> None:
        """Call `rename(seconds)` until it succeeds, or the paths show that it has.

        If attempt number `attempt` (from 1) finds `src` missing or `dst` taken, `earlier_may_have_happened(attempt)`
        says whether an earlier request was never answered.
        """
        before = self.stat(src)
        if replace and before.is_dir:
            raise StorageError(
                f"{src} cannot replace {dst}", got="a directory", allowed="a file", next_step="Use rename_new."
            )
        attempts = 0

        def attempt(left_s: float) -> None:
            nonlocal attempts
            attempts += 1
            limit_s = min(left_s, self.call_deadline_s)
            try:
                rename(limit_s)
            except (NotFoundError, ExistsError):
                # The unanswered request may have succeeded, before this one or during it.
                if not earlier_may_have_happened(attempts) or not self._moved(before, src, dst, limit_s):
                    raise

        with_retries(attempt, what=f"`rename {src} to {dst}`", whom=self.whom, give_up_s=self.give_up_s)

    def _file(self, url: str) -> FileStat:
        status = self.stat(url)
        if status.is_dir:
            raise NotFoundError(f"cannot read {url}", got="a directory", allowed="a file", next_step="Check the path.")
        return status

    def _moved(self, before: FileStat, src: str, dst: str, limit_s: float) -> bool:
        """Whether `src` is gone and `dst` is that file; sources have a nonce, so no other process moves them."""

        def look(url: str) -> FileStat | None:
            try:
                return self.stat_once(url, limit_s)
            except NotFoundError:
                return None

        there = look(dst)
        if look(src) is not None or there is None or there.is_dir != before.is_dir:
            return False
        return before.is_dir or (there.size_bytes, there.mtime_ms) == (before.size_bytes, before.mtime_ms)
