"""What the backends of one HDFS share, whichever way they reach it: reading by pieces, and renames that are settled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from io import BufferedReader
from typing import BinaryIO

from lockstep.storage.errors import ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileStat, FileSystem, RangeFile
from lockstep.storage.files.ranges import check_range, short_file
from lockstep.storage.files.remote_streams import READ_BUFFER_BYTES, READ_PIECE_BYTES, RemoteRanges, RemoteRaw
from lockstep.storage.files.retry import with_retries


class RemoteFileSystem(FileSystem):
    """Attributes: `whom` for errors, `call_deadline_s` and `data_deadline_s` for one attempt at the NameNode and at
    data, `give_up_s` for all attempts of one call, in seconds.
    """

    whom: str
    call_deadline_s: float
    data_deadline_s: float
    give_up_s: float

    @abstractmethod
    def raw(self, url: str, size: int, begin: int = 0) -> RemoteRaw:
        """A file whose first `size` bytes must be readable, most likely read from `begin` on."""

    @abstractmethod
    def stat_once(self, url: str, deadline_s: float) -> FileStat:
        """`stat` by one attempt."""

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
        """Call `rename(seconds)` until it is told to have happened, or is found to have.

        `earlier_may_have_happened(attempt)`, asked when the attempt of that number (1 for the first) did not find
        `src`, or found `dst` taken: whether a request before that answer had no answer of its own.
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
                # The request without an answer may have happened, now or while this one was on its way.
                if not earlier_may_have_happened(attempts) or not self._moved(before, src, dst, limit_s):
                    raise

        with_retries(attempt, what=f"`rename {src} to {dst}`", whom=self.whom, give_up_s=self.give_up_s)

    def _file(self, url: str) -> FileStat:
        status = self.stat(url)
        if status.is_dir:
            raise NotFoundError(f"cannot read {url}", got="a directory", allowed="a file", next_step="Check the path.")
        return status

    def _moved(self, before: FileStat, src: str, dst: str, limit_s: float) -> bool:
        """Whether `src` is gone and what lies at `dst` is it; sources bear a nonce, so nobody else moved them."""

        def look(url: str) -> FileStat | None:
            try:
                return self.stat_once(url, limit_s)
            except NotFoundError:
                return None

        there = look(dst)
        if look(src) is not None or there is None or there.is_dir != before.is_dir:
            return False
        return before.is_dir or (there.size_bytes, there.mtime_ms) == (before.size_bytes, before.mtime_ms)
