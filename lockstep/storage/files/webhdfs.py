"""webhdfs:// by the `hdfs` package, plus what it leaves to its caller: deadlines, retries, settled renames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.storage.errors import (
    LockstepError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    StorageTimeoutError,
)
from lockstep.storage.files.deadlines import with_retries
from lockstep.storage.files.interface import FileStat, Listing, StoredChecksum, Writer
from lockstep.storage.files.remote import RemoteFileSystem, lost_by_writer
from lockstep.storage.files.webhdfs_http import (
    OTHER_FORM,
    LostAnswerError,
    RefusedError,
    Sent,
    WebHdfsCalls,
    checked,
    host_of,
    location,
    path_of,
)
from lockstep.storage.files.webhdfs_streams import WebHdfsRaw, WebHdfsWriter
from lockstep.storage.urls import join

_DISCARD_S = 5.0


class WebHdfsFileSystem(RemoteFileSystem):
    """One HDFS over HTTP, by authority ("host:port", "host:port,host:port" or a name service) and settings; over TLS
    for the `scheme` swebhdfs.

    `token` is a delegation token; without one requests have a ticket under Kerberos, else name `user`. Deadlines
    are those of hdfs:// (`lockstep.storage.*`). There is no durable sync, so it can hold datasets, but no run of
    lockstep train.
    """

    def __init__(
        self, authority: str, settings: Mapping[str, str], *, user: str, token: str | None, scheme: str = "webhdfs"
    ) -> None:
        self.calls = WebHdfsCalls(authority, settings, user=user, token=token, scheme=scheme)
        self.whom, self.give_up_s = self.calls.whom, self.calls.give_up_s
        self.call_deadline_s, self.data_deadline_s = self.calls.call_deadline_s, self.calls.data_deadline_s

    def raw(self, url: str, size: int, begin: int = 0) -> WebHdfsRaw:
        return WebHdfsRaw(self, url, size, begin)

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        path = path_of(url)
        lost = False

        def attempt(left_s: float) -> None:
            nonlocal lost
            limit = min(left_s, self.call_deadline_s)
            if lost:
                # A create without an answer may still happen, so only a new name is safe, which only the caller can
                # choose. Raise as soon as the NameNode answers again.
                self.calls.once(lambda client: client._get_file_status("/"), "create", url, limit)
                raise _Unsettled
            overwrite = str(not exclusive).lower()
            where = self.calls.once(
                lambda client: location(client._create(path, overwrite=overwrite)), "create", url, limit
            )
            try:
                self.calls.send("PUT", where, b"", "create", url, min(left_s, self.data_deadline_s))
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

        def ask(client: Any) -> Listing:
            found = client._list_status(path).json()["FileStatuses"]["FileStatus"]
            if len(found) == 1 and found[0]["pathSuffix"] == "":
                raise StorageError(
                    f"cannot list {url}", got="a file", allowed="a directory", next_step="Check the path."
                )
            return [_stat(join(url, _name(item["pathSuffix"])), item) for item in found]

        return sorted(self.calls.call(ask, "list", url), key=lambda entry: entry.name)

    def stat(self, url: str) -> FileStat:
        return self.calls.call(lambda client: _ask_stat(client, url), "find", url)

    def stat_once(self, url: str, deadline_s: float) -> FileStat:
        return self.calls.once(lambda client: _ask_stat(client, url), "find", url, deadline_s)

    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        path, permission = path_of(url), f"{mode:o}"
        if not self.calls.call(
            lambda client: client._mkdirs(path, permission=permission).json()["boolean"], "make", url
        ):
            raise StorageError(f"cannot make {url}", got="false", allowed="true", next_step="See the NameNode's log.")

    def delete(self, url: str, *, recursive: bool = False) -> bool:
        sent = Sent()
        try:
            removed = self.calls.call(lambda client: _delete(sent.over(client), url, recursive), "delete", url)
            # If the last request finds nothing, an earlier one may have removed it and lost its answer.
            return removed or len(sent) > 1
        except NotFoundError:
            return False  # something above it is a file

    def discard(self, url: str) -> bool:
        try:
            return self.calls.once(lambda client: _delete(client, url, True), "delete", url, _DISCARD_S)
        except LockstepError:
            return False  # a temporary file may stay; the caller has its first error to raise

    def stored_checksum(self, url: str) -> StoredChecksum | None:
        path = path_of(url)

        def ask(client: Any) -> StoredChecksum:
            answer = checked(client._request("GET", url=location(client._locate_checksum(path))))
            try:
                found = answer.json()["FileChecksum"]
                return StoredChecksum(str(found["algorithm"]), bytes.fromhex(found["bytes"])[: int(found["length"])])
            except OTHER_FORM as error:
                raise RefusedError("", f"no checksum: {error!r}", answer.status_code, host_of(answer)) from None

        return self.calls.call_data(ask, "digest", url)

    def locate_append(self, url: str) -> str:
        """The URL at a DataNode to which more of a file is sent."""
        path = path_of(url)
        try:
            return self.calls.call(lambda client: location(client._append(path)), "append to", url)
        except NotFoundError as error:  # the caller must start again; a retry would not bring the file back
            raise lost_by_writer(f"cannot write {url}", error.got) from None

    def _rename(self, src: str, dst: str, options: str) -> None:
        source, target, sent = path_of(src), path_of(dst), Sent()

        def rename(limit_s: float) -> None:
            answer = self.calls.once(
                lambda client: sent.over(client)._rename(source, destination=target, renameoptions=options),
                "rename", f"{src} to {dst}", limit_s,
            )  # fmt: skip
            if answer.content:  # the older rename, which moves into an existing directory and answers false on failure
                raise StorageError(
                    f"{self.whom} does not know renames that refuse a taken name",
                    got="an answer to another kind of rename (HttpFS?)",
                    allowed="a NameNode of Hadoop 2.6 or later",
                    next_step=f"Look where {src} is now, and use the NameNode's own address.",
                )

        self.rename_settled(
            src, dst, replace=options == "OVERWRITE", rename=rename, earlier_may_have_happened=lambda _: len(sent) > 0
        )


class _Unsettled(Exception):
    """Ends the attempts of a create that may have happened, or may happen later."""


def _delete(client: Any, url: str, recursive: bool) -> bool:
    return bool(client._delete(path_of(url), recursive=str(recursive).lower()).json()["boolean"])


def _ask_stat(client: Any, url: str) -> FileStat:
    return _stat(url, client._get_file_status(path_of(url)).json()["FileStatus"])


def _stat(url: str, status: Mapping[str, Any]) -> FileStat:
    is_dir = status["type"] == "DIRECTORY"
    name = path_of(url).rpartition("/")[2]
    special = status["type"] not in ("DIRECTORY", "FILE")
    length = 0 if is_dir else int(status["length"])
    if length < 0:
        raise ValueError(f"{length} as the length of a file")
    return FileStat(url, name, is_dir, length, int(status["modificationTime"]), special)


def _name(found: object) -> str:
    # An empty name would make a directory its own entry, and a walk endless.
    if not isinstance(found, str) or not found or "/" in found:
        raise ValueError(f"{found!r} as a name in a directory")
    return found
