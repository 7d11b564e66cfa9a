"""hdfs:// by hdfs-native, plus what it leaves to its caller: deadlines, retries, settled renames, checked lengths.

Decision 001 (hdfs-deadlines) has the measurements.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lockstep.storage.errors import (
    ConfigError,
    ExistsError,
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    StorageTimeoutError,
)
from lockstep.storage.files.deadlines import Unanswered, given_up, with_retries
from lockstep.storage.files.hdfs_cures import cured, first_line
from lockstep.storage.files.interface import FileStat, Listing, Writer, short_file
from lockstep.storage.files.remote import (
    RETRYABLE_JAVA,
    RemoteFileSystem,
    RemoteRaw,
    RemoteWriter,
    below_a_file,
    check,
    erasure_coded,
    no_ticket,
    not_in_service,
    not_there,
    taken,
    without_secrets,
)
from lockstep.storage.settings import seconds
from lockstep.storage.urls import join, split_url

_RPC = re.compile(r'^(?:Fatal)?RPCError\("(?P<java>[^"]+)", "(?P<text>.*)', re.DOTALL)
# hdfs-native prints twenty fields of a DataNode; these two identify it.
_DATANODE = re.compile(r'DatanodeInfoProto \{ id: DatanodeIdProto \{ ip_addr: \\*"([^"\\]+)\\*".*?xfer_port: (\d+)')
# Each DataTransferError is a DataNode that was lost or that answered amiss: another may take the block, or have it.
_RETRYABLE_TEXT = (
    "could only be written to",
    "SafeModeException",
    "DataTransferError(",
    "All DataNodes failed",  # which `_parts` shortens
    "Not enough valid shards",
)
_FIRST_S = 15.0
_BYTES_PER_S = 1 << 20
T = TypeVar("T")
_DISCARD_S = 5.0
_PROBE_S = 2.0
_DATA_VERBS = ("read", "write", "sync", "close")  # calls that involve DataNodes


def translate(error: BaseException, *, verb: str, place: str, whom: str) -> LockstepError:
    """Our error for one of hdfs-native's, raised while `verb`-ing `place` on `whom`."""
    java, text = _parts(error)
    what = f"cannot {verb} {place}"
    if isinstance(error, FileNotFoundError):
        return not_there(what, verb, text)
    if isinstance(error, FileExistsError) or "must both be directories" in text or "directory is not empty" in text:
        return taken(what, text)
    if java == "ParentNotDirectoryException" or "(is not a directory" in text:
        return below_a_file(what, verb, text)
    if (known := cured(what, java, text)) is not None:
        return known
    if java == "SecretManager$InvalidToken":  # a newer one may be on its way
        return RetryableStorageError(
            f"{what}: the delegation token is not valid any more",
            got=text,
            allowed="a token in HADOOP_TOKEN_FILE_LOCATION that is renewed, or a newer one",
            next_step="Start the job with a new token, or with a keytab: see docs/sites.md.",
        )
    if java in RETRYABLE_JAVA or any(mark in text for mark in _RETRYABLE_TEXT):
        return not_in_service(what, text, whom)
    if "No NameNode hosts found" in text:
        return ConfigError(
            f"{what}: no NameNode is known for this name service",
            got=text,
            allowed="hdfs://HOST:PORT, or a name service that HADOOP_CONF_DIR or Spark's settings define",
            next_step="Set HADOOP_CONF_DIR, or write the NameNode's host and port.",
        )
    if "UrlParseError" in text or "No fs.defaultFS" in text:
        return ConfigError(
            f"{what}: it names no NameNode",
            got=text,
            allowed="hdfs://HOST:PORT/PATH, or a name service that HADOOP_CONF_DIR or Spark's settings define",
            next_step="Correct the URL, or set HADOOP_CONF_DIR.",
        )
    if "hsync is not supported for erasure-coded" in text:
        return erasure_coded(what, text)
    if "UnsupportedErasureCodingPolicy" in text or "UnsupportedFeature" in text:
        return StorageError(
            f"{what}: hdfs:// cannot do this here",
            got=text,
            allowed="replication, erasure coding by Reed-Solomon, encryption zones",
            next_step="Read it by webhdfs:// instead: there a DataNode decodes it.",
        )
    if "KMS " in text:
        return RetryableStorageError(
            f"{what}: the key server of its encryption zone gave no key",
            got=text,
            allowed="an answer of the server in hadoop.security.key.provider.path",
            next_step="Check that the key server (KMS) runs, and that this user may decrypt with the zone's key.",
        )
    if "Name or service not known" in text:
        return StorageError(
            f"{what}: {whom} has no address",
            got=text,
            allowed="a host name that resolves",
            next_step="Check the host in the URL.",
        )
    if "GSSAPIError" in text:
        return no_ticket(what, _gss(text))
    if isinstance(error, OSError):
        # Its OSErrors are lost or refused connections; errno is never set, so the text is all there is.
        return RetryableStorageError(what, got=text, allowed="a connection", next_step=check(whom))
    if isinstance(error, (ValueError, TypeError)):
        return StorageError(what, got=text, allowed="a valid call", next_step="Check the path and the settings.")
    return StorageError(
        what, got=f"{java}: {text}" if java else text, allowed="success", next_step="See the NameNode's log."
    )


def _gss(text: str) -> str:
    """What Kerberos says in one of hdfs-native's GSSAPIErrors, whose last part is that text."""
    return text.rpartition(', "')[2].rstrip('")') or text


def _parts(error: BaseException) -> tuple[str, str]:
    """Return (Java class without its package or "", first line of the message)."""
    message = str(error) or repr(error)
    found = _RPC.match(message)
    java, text = (found["java"].rpartition(".")[2], found["text"]) if found else ("", message)
    if "All DataNodes failed" in text and (tried := _DATANODE.findall(text)):
        text = f"All DataNodes failed: {', '.join(f'{host}:{port}' for host, port in tried)}"
    # Inside RPCError the text is a Rust literal, so its line ends are written out.
    return java, without_secrets(first_line(text).removesuffix('")'))


class HdfsRaw(RemoteRaw):
    """A file to be read (hdfs-native's own reader breaks inside `io.BufferedReader`).

    hdfs-native reads an unclosed file as empty without an error, and panics on a read past the end, so both are
    checked first.
    """

    def __init__(self, fs: HdfsFileSystem, url: str, size: int) -> None:
        super().__init__(url, size)
        self._fs = fs
        self._path = split_url(url)[2]
        self._inner: Any = None

    def read_at(self, offset: int, length: int) -> bytes:
        def read(client: Any) -> bytes:
            inner = self._inner
            self._inner = None  # after a failure or a timeout the next attempt opens the file again
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
    """A new file. After a failure it is never closed: that would wait 15 s for blocks that never come."""

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
        # A pipeline whose second DataNode is dead, or whose first one is frozen, hangs without an error. A writer that
        # has sent little data gives up sooner than one that may have much data on its way to the disks.
        limit_s = min(self._fs.data_deadline_s, _FIRST_S + self._written / _BYTES_PER_S)
        self._fs.once(lambda _client: step(inner), verb, self._url, limit_s)


class HdfsFileSystem(RemoteFileSystem):
    """One HDFS, by authority ("host:port", a name service, or "" for fs.defaultFS) and settings.

    Every call has deadlines: `lockstep.storage.call-deadline-s` for an attempt at the NameNode, `...data-deadline-s`
    for data, `...give-up-s` for all attempts. An attempt that times out abandons its thread and its client.
    """

    def __init__(self, authority: str, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self._authority = authority
        self.whom = _whom(authority, self._settings)
        self.call_deadline_s = seconds(settings, "lockstep.storage.call-deadline-s")
        self.data_deadline_s = seconds(settings, "lockstep.storage.data-deadline-s")
        self.give_up_s = seconds(settings, "lockstep.storage.give-up-s")
        self._lock = threading.Lock()
        self._raw: Any = None
        self._calls = Unanswered()

    @property
    def away(self) -> bool:
        return given_up(self.whom)

    def raw(self, url: str, size: int, begin: int = 0) -> HdfsRaw:
        return HdfsRaw(self, url, size)

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        from hdfs_native import WriteOptions

        path = _path(url)
        options = WriteOptions(overwrite=not exclusive, create_parent=True)

        attempts = 0
        lost: StorageTimeoutError | None = None

        def attempt(left_s: float) -> Any:
            nonlocal attempts, lost
            attempts += 1
            limit = min(left_s, self.call_deadline_s)
            if lost is not None:
                # A create that timed out may still happen, so only a new name is safe, which only the caller can
                # choose. Raise as soon as the NameNode answers again.
                self.once(lambda raw: raw.get_file_info("/"), "create", url, limit)
                raise _Unsettled(lost)
            try:
                return self.once(lambda raw: raw.create(path, options), "create", url, limit)
            except StorageTimeoutError as error:
                lost = error
                raise
            except ExistsError as error:
                if attempts == 1:
                    raise
                # Perhaps an earlier attempt of ours succeeded and its answer was lost.
                raise _Unsettled(RetryableStorageError(error.what, got=error.got)) from None

        try:
            inner = with_retries(attempt, what=f"`create {url}`", whom=self.whom, give_up_s=self.give_up_s)
        except _Unsettled as unsettled:
            raise unsettled.error from None
        return HdfsWriter(self, url, inner)

    def rename_new(self, src: str, dst: str) -> None:
        self._rename(src, dst, overwrite=False)

    def replace(self, src: str, dst: str) -> None:
        self._rename(src, dst, overwrite=True)

    def list(self, url: str) -> Listing:
        path = _path(url)

        found = self.call(lambda raw: [*raw.list_status(path, False)], "list", url)
        if len(found) == 1 and not found[0].isdir and found[0].path.rstrip("/") == path:
            raise StorageError(f"cannot list {url}", got="a file", allowed="a directory", next_step="Check the path.")
        return sorted((_stat(join(url, _name(item.path)), item) for item in found), key=lambda entry: entry.name)

    def stat(self, url: str) -> FileStat:
        path = _path(url)
        return _stat(url, self.call(lambda raw: raw.get_file_info(path), "find", url))

    def stat_once(self, url: str, deadline_s: float) -> FileStat:
        path = _path(url)
        return _stat(url, self.once(lambda raw: raw.get_file_info(path), "find", url, deadline_s))

    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        path = _path(url)
        self.call(lambda raw: raw.mkdirs(path, mode, True), "make", url)

    def delete(self, url: str, *, recursive: bool = False) -> bool:
        path, attempts = _path(url), 0

        def remove(raw: Any) -> bool:
            nonlocal attempts
            attempts += 1
            return bool(raw.delete(path, recursive))

        try:
            # If a second attempt finds nothing, the first may have removed it and lost its answer.
            return self.call(remove, "delete", url) or attempts > 1
        except NotFoundError:
            return False  # something above it is a file

    def discard(self, url: str) -> bool:
        path = _path(url)
        try:
            return bool(self.once(lambda raw: raw.delete(path, True), "delete", url, _DISCARD_S))
        except LockstepError:
            return False  # a temporary file may stay; the caller has its first error to raise

    def call(self, fn: Callable[[Any], T], verb: str, url: str, *, deadline_s: float | None = None) -> T:
        """Run `fn(client)` until it succeeds, fails for good, or the total time is over."""
        limit = self.call_deadline_s if deadline_s is None else deadline_s
        return with_retries(
            lambda left_s: self.once(fn, verb, url, min(left_s, limit)),
            what=f"`{verb} {url}`",
            whom=self.whom,
            give_up_s=self.give_up_s,
        )

    def once(self, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        """One attempt, ended at its deadline; hdfs-native's errors become ours."""
        made: list[Any] = []

        def run() -> T:
            made.append(self._client())
            return fn(made[0])

        try:
            return self._calls.call(run, deadline_s, what=f"cannot {verb} {url}", whom=self.whom)
        except StorageTimeoutError as error:
            # Keep the client if its NameNode answers: the call may never return, and would also hold the threads and
            # connections of a client that was replaced.
            if verb in _DATA_VERBS and self._answers():
                raise _frozen_datanode(verb, url, deadline_s, self.whom) from error
            self._forget(made)
            raise
        except LockstepError:
            raise
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # hdfs-native panics are BaseExceptions
            if isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, FileExistsError)):
                self._forget(made)
            raise translate(error, verb=verb, place=url, whom=self.whom) from error

    def _answers(self) -> bool:
        """Whether the NameNode answers now, if only by a refusal."""
        try:
            self.once(lambda raw: raw.get_file_info("/"), "find", "/", min(_PROBE_S, self.call_deadline_s))
        except (StorageTimeoutError, RetryableStorageError):
            return False
        except LockstepError:
            return True
        return True

    def _client(self) -> Any:
        with self._lock:
            if self._raw is None:
                from hdfs_native import Client

                url = f"hdfs://{self._authority}" if self._authority else None
                config = {key: value for key, value in self._settings.items() if not key.startswith("lockstep.")}
                # The inner client: the wrapper's writers close in their finaliser, which blocks 15 s after a failure.
                self._raw = Client(url, config).inner
            return self._raw

    def _forget(self, clients: Sequence[Any]) -> None:
        with self._lock:
            if clients and self._raw is clients[0]:
                self._raw = None

    def _rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        source, target = _path(src), _path(dst)

        def rename(limit_s: float) -> None:
            self.once(lambda raw: raw.rename(source, target, overwrite), "rename", f"{src} to {dst}", limit_s)

        self.rename_settled(
            src, dst, replace=overwrite, rename=rename, earlier_may_have_happened=lambda attempt: attempt > 1
        )


class _Unsettled(Exception):
    """Carries past the retries the failure of a create that may have happened, or may happen later."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(error)
        self.error = error


def _frozen_datanode(verb: str, url: str, deadline_s: float, whom: str) -> StorageTimeoutError:
    # hdfs-native does not say which DataNodes it uses.
    return StorageTimeoutError(
        f"cannot {verb} {url}: no answer from a DataNode of it within {deadline_s:.3g} s",
        got=f"an answer only from {whom}",
        allowed="an answer",
        next_step="Find the DataNode that is frozen or unreachable (`hdfs dfsadmin -report`: its last contact).",
    )


def _path(url: str) -> str:
    return re.sub("/+", "/", split_url(url)[2]).rstrip("/") or "/"


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _stat(url: str, status: Any) -> FileStat:
    size = 0 if status.isdir else status.length
    return FileStat(url, _name(_path(url)), status.isdir, size, status.modification_time)


def _whom(authority: str, settings: Mapping[str, str]) -> str:
    place = authority or split_url(settings.get("fs.defaultFS", "hdfs://(no fs.defaultFS is set)"))[1]
    nodes = [settings[key] for key in sorted(settings) if key.startswith(f"dfs.namenode.rpc-address.{place}.")]
    return f"the NameNode at {place}" if not nodes else f"the NameNodes of {place} at {', '.join(nodes)}"
