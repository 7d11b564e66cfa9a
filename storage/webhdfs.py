"""webhdfs:// by the `hdfs` package, with what it leaves to its caller: deadlines, retries, settled renames."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from io import BufferedReader
from typing import Any, BinaryIO, TypeVar

from hdfs.util import HdfsError
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from storage.deadline import call_with_deadline
from storage.errors import (
    ConfigError,
    ExistsError,
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    StorageTimeoutError,
)
from storage.interface import Blocks, FileStat, FileSystem, HdfsBlock, Listing, Promises, StoredChecksum, Writer
from storage.local import check_range, short_file
from storage.retry import with_retries
from storage.settings import seconds
from storage.urls import join, split_url
from storage.webhdfs_address import http_addresses
from storage.webhdfs_client import RefusedError, checked, location, make_client
from storage.webhdfs_errors import LostAnswerError, translate
from storage.webhdfs_streams import READ_BUFFER_BYTES, WebHdfsRaw, WebHdfsWriter

T = TypeVar("T")

_DISCARD_S = 5.0
_PIECE_BYTES = 1 << 23
_CONNECT_S = 10.0
_BELOW = (HdfsError, RefusedError, RequestException, HTTPError, HTTPException, OSError, ValueError, KeyError, TypeError)


class WebHdfsFileSystem(FileSystem):
    """One HDFS over HTTP, by authority ("host:port", "host:port,host:port" or a name service) and settings.

    `token` is a delegation token; without one the server is told `user`. Deadlines are those of hdfs://
    (`lockstep.storage.*`). There is no durable sync: a run of jobs.train cannot lie here, datasets can.
    """

    promises = Promises(atomic_rename=True, durable_sync=False)

    def __init__(self, authority: str, settings: Mapping[str, str], *, user: str, token: str | None) -> None:
        addresses = http_addresses(authority, settings)
        hosts = ", ".join(address.removeprefix("http://") for address in addresses)
        self.whom = f"the NameNode{'s' if len(addresses) > 1 else ''} at {hosts}"
        self.whom_data = f"a DataNode of {self.whom}"
        self.call_deadline_s = seconds(settings, "lockstep.storage.call-deadline-s")
        self.data_deadline_s = seconds(settings, "lockstep.storage.data-deadline-s")
        self.give_up_s = seconds(settings, "lockstep.storage.give-up-s")
        # Each address gets its turn within the deadline of a call: a frozen NameNode must not use up the other's.
        each_s = 0.9 * self.call_deadline_s / len(addresses)
        who: dict[str, Any] = {"user": user, "token": token}
        self._names = make_client(addresses, **who, connect_s=min(_CONNECT_S, each_s), read_s=each_s)
        # The connect limit is also that of each send, which waits for the slowest DataNode of the pipeline.
        self._data = make_client(addresses, **who, connect_s=self.call_deadline_s, read_s=self.data_deadline_s)

    def open_read(self, url: str) -> BinaryIO:
        return BufferedReader(WebHdfsRaw(self, url, self._file(url).size_bytes), READ_BUFFER_BYTES)

    def read_range(self, url: str, offset: int, length: int) -> bytes:
        check_range(url, offset, length)
        with WebHdfsRaw(self, url, offset + length, begin=offset) as raw:
            pieces = []
            for start in range(offset, offset + length, _PIECE_BYTES):
                pieces.append(raw.read_at(start, min(_PIECE_BYTES, offset + length - start)))
            if not length and offset > (size := self._file(url).size_bytes):
                raise short_file(url, offset, 0, size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        path = path_of(url)
        lost = False

        def attempt(left_s: float) -> None:
            nonlocal lost
            limit = min(left_s, self.call_deadline_s)
            if lost:
                # A create without an answer may still happen, so only a new name is safe, and only the caller can
                # choose one; it is told so as soon as the NameNode answers again.
                self.once(lambda client: client._get_file_status("/"), "create", url, limit)
                raise _Unsettled
            answer = self.once(
                lambda client: client._create(path, overwrite=str(not exclusive).lower()), "create", url, limit
            )
            try:
                self.send("PUT", location(answer), b"", "create", url, min(left_s, self.data_deadline_s))
            except (LostAnswerError, StorageTimeoutError):
                lost = True
                raise

        try:
            with_retries(attempt, what=f"`create {url}`", whom=self.whom, give_up_s=self.give_up_s)
        except _Unsettled:
            raise RetryableStorageError(
                f"cannot create {url}: it was not answered and may still happen",
                got="no answer",
                allowed="an answer",
                next_step="Use another name.",
            ) from None
        return WebHdfsWriter(self, url)

    def rename_new(self, src: str, dst: str) -> None:
        self._rename(src, dst, "NONE")

    def replace(self, src: str, dst: str) -> None:
        self._rename(src, dst, "OVERWRITE")

    def list(self, url: str) -> Listing:
        path = path_of(url)
        found = self.call(lambda client: client._list_status(path).json()["FileStatuses"]["FileStatus"], "list", url)
        if len(found) == 1 and not found[0]["pathSuffix"]:
            raise StorageError(f"cannot list {url}", got="a file", allowed="a directory", next_step="Check the path.")
        return sorted((_stat(join(url, item["pathSuffix"]), item) for item in found), key=lambda entry: entry.name)

    def stat(self, url: str) -> FileStat:
        return _stat(url, self._status(url))

    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        path = path_of(url)
        if not self.call(lambda client: client._mkdirs(path, permission=f"{mode:o}").json()["boolean"], "make", url):
            raise StorageError(f"cannot make {url}", got="false", allowed="true", next_step="See the NameNode's log.")

    def delete(self, url: str, *, recursive: bool = False) -> bool:
        attempts = 0

        def remove(client: Any) -> bool:
            nonlocal attempts
            attempts += 1
            return _delete(client, url, recursive)

        try:
            # Where a second attempt finds nothing, the first one may have removed it without an answer.
            return self.call(remove, "delete", url) or attempts > 1
        except NotFoundError:
            return False  # something above it is a file

    def discard(self, url: str) -> bool:
        try:
            return self.once(lambda client: _delete(client, url, True), "delete", url, _DISCARD_S)
        except LockstepError:
            return False  # what lies under a temporary name may stay; the caller has a first error to tell

    def block_locations(self, url: str) -> Blocks:
        path = path_of(url)

        def ask(client: Any) -> Any:
            return client._get_file_block_locations(path).json()["BlockLocations"]["BlockLocation"]

        found = self.call(ask, "locate", url)
        return [HdfsBlock(block["offset"], block["length"], tuple(block["hosts"])) for block in found]

    def stored_checksum(self, url: str) -> StoredChecksum | None:
        path = path_of(url)

        def ask(client: Any) -> Any:
            return checked(client._request("GET", url=location(client._locate_checksum(path)))).json()["FileChecksum"]

        status = self._status(url)
        if not status["length"]:
            return None  # nothing to compare but the length
        told = self.call_data(ask, "digest", url)
        return StoredChecksum(
            str(told["algorithm"]), bytes.fromhex(told["bytes"])[: told["length"]], status["blockSize"]
        )

    # what the streams need too

    def call(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """Ask the NameNode by `fn(client)` until it succeeds, fails for good, or the total time is over."""
        return self._retried(self._names, fn, verb, url, self.call_deadline_s)

    def call_data(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """The same for what also asks DataNodes."""
        return self._retried(self._data, fn, verb, url, self.data_deadline_s)

    def once(self, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        """One attempt at the NameNode, ended at its deadline."""
        return self._once(self._names, fn, verb, url, deadline_s)

    def locate_append(self, url: str) -> str:
        """The URL at a DataNode to which more of a file is sent."""
        path = path_of(url)
        try:
            return self.call(lambda client: location(client._append(path)), "append to", url)
        except NotFoundError as error:  # for the caller to begin anew; asking again would not bring it back
            raise RetryableStorageError(
                f"cannot write {url}: the file was taken away from its writer", got=error.got
            ) from None

    def send(
        self, method: str, where: str, body: bytes | Iterable[bytes], verb: str, url: str, deadline_s: float = 0.0
    ) -> None:
        """Send `body` to a DataNode, on a thread that is left behind after `deadline_s`; 0: on this one."""

        def run(client: Any) -> None:
            checked(client._request(method, url=where, data=body))

        if deadline_s:
            self._once(self._data, run, verb, url, deadline_s)
            return
        try:
            run(self._data)
        except _BELOW as error:
            raise translate(error, verb=verb, place=url, whom=self.whom) from None

    # how

    def _retried(self, client: Any, fn: Callable[[Any], T], verb: str, url: str, limit_s: float) -> T:
        return with_retries(
            lambda left_s: self._once(client, fn, verb, url, min(left_s, limit_s)),
            what=f"`{verb} {url}`",
            whom=self.whom,
            give_up_s=self.give_up_s,
        )

    def _once(self, client: Any, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        # The time-outs of sockets end most waits; the deadline also ends name look-ups and answers that trickle.
        try:
            return call_with_deadline(lambda: fn(client), deadline_s, what=f"cannot {verb} {url}", whom=self.whom)
        except LockstepError:
            raise
        except _BELOW as error:
            # Without its cause: requests puts whole URLs into messages, and a token is part of them.
            raise translate(error, verb=verb, place=url, whom=self.whom) from None

    def _status(self, url: str) -> dict[str, Any]:
        path = path_of(url)
        found: dict[str, Any] = self.call(
            lambda client: client._get_file_status(path).json()["FileStatus"], "stat", url
        )
        return found

    def _file(self, url: str) -> FileStat:
        status = self.stat(url)
        if status.is_dir:
            raise NotFoundError(f"cannot read {url}", got="a directory", allowed="a file", next_step="Check the path.")
        return status

    def _rename(self, src: str, dst: str, options: str) -> None:
        source, target = path_of(src), path_of(dst)
        before = self.stat(src)
        if options == "OVERWRITE" and before.is_dir:
            raise StorageError(
                f"{src} cannot replace {dst}", got="a directory", allowed="a file", next_step="Use rename_new."
            )
        attempts = 0

        def attempt(left_s: float) -> None:
            nonlocal attempts
            attempts += 1
            limit = min(left_s, self.call_deadline_s)
            try:
                answer = self.once(
                    lambda client: client._rename(source, destination=target, renameoptions=options),
                    "rename", f"{src} to {dst}", limit,
                )  # fmt: skip
            except (NotFoundError, ExistsError):
                # An attempt without an answer may have happened, now or while this one was on its way.
                if attempts == 1 or not self._moved(before, src, dst, limit):
                    raise
                return
            if answer.content:  # the old rename's answer, which moves into a directory and tells what is wrong by false
                raise StorageError(
                    f"{self.whom} does not know renames that refuse a taken name",
                    got="an answer to another kind of rename (HttpFS?)",
                    allowed="a NameNode of Hadoop 2.6 or later",
                    next_step=f"Look where {src} is now, and use the NameNode's own address.",
                )

        with_retries(attempt, what=f"`rename {src} to {dst}`", whom=self.whom, give_up_s=self.give_up_s)

    def _moved(self, before: FileStat, src: str, dst: str, limit_s: float) -> bool:
        """Whether `src` is gone and what lies at `dst` is it; sources bear a nonce, so nobody else moved them."""

        def look(url: str) -> FileStat | None:
            path = path_of(url)
            try:
                found = self.once(lambda client: client._get_file_status(path), "stat", url, limit_s)
            except NotFoundError:
                return None
            return _stat(url, found.json()["FileStatus"])

        there = look(dst)
        if look(src) is not None or there is None or there.is_dir != before.is_dir:
            return False
        return before.is_dir or (there.size_bytes, there.mtime_ms) == (before.size_bytes, before.mtime_ms)


class _Unsettled(Exception):
    """Ends the attempts of a create that may have happened, or may happen later."""


def path_of(url: str) -> str:
    """The path on HDFS. Raises ConfigError for `.` and `..`, which an HTTP client would resolve by itself."""
    path = re.sub("/+", "/", split_url(url)[2]).rstrip("/") or "/"
    if any(part in (".", "..") for part in path.split("/")):
        raise ConfigError(
            f"{url} is not a plain path",
            got="`.` or `..` in it",
            allowed="names",
            next_step="Write the path that is meant.",
        )
    return path


def _delete(client: Any, url: str, recursive: bool) -> bool:
    return bool(client._delete(path_of(url), recursive=str(recursive).lower()).json()["boolean"])


def _stat(url: str, status: Mapping[str, Any]) -> FileStat:
    is_dir = status["type"] == "DIRECTORY"
    name = path_of(url).rpartition("/")[2]
    special = status["type"] not in ("DIRECTORY", "FILE")
    return FileStat(url, name, is_dir, 0 if is_dir else int(status["length"]), int(status["modificationTime"]), special)
