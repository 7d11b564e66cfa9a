"""s3://, gs:// and az:// by obstore: whole objects, ranges, and writes on a condition that the server checks.

A store has no directories and no rename. A directory is a common beginning of names; a rename copies on the server and
then deletes (decision 011).
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from lockstep.storage.errors import CorruptionError, ExistsError, LockstepError, NotFoundError, StorageError
from lockstep.storage.files.deadlines import given_up, with_retries
from lockstep.storage.files.interface import (
    COMPLETE_MARKS,
    MAX_WHOLE_BYTES,
    ConditionalWrites,
    FileStat,
    Listing,
    Promises,
    Writer,
    short_file,
)
from lockstep.storage.files.object_clients import clients, translate, whom
from lockstep.storage.files.remote import RemoteFileSystem, RemoteRaw
from lockstep.storage.settings import seconds
from lockstep.storage.urls import join, parent, split_url

T = TypeVar("T")
PART_BYTES = 1 << 24  # of an upload in parts: S3 takes 10,000, so a file has at most 156 GiB
PARTS_AT_ONCE = 4
COPIES_AT_ONCE = 8
COPY_LIMIT_BYTES = 5 << 30  # the most that S3 copies in one request
_DISCARD_S = 5.0
_AFTER_THE_END = re.compile("416 |range starting at")  # where a range begins, by S3, and by Azure as Azurite serves it


class ObjectRaw(RemoteRaw):
    """An object to be read, one request a range."""

    def __init__(self, fs: ObjectStore, url: str, size: int) -> None:
        super().__init__(url, size)
        self._fs = fs

    def read_at(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        return self._fs.read_once(self._url, offset, length)


class ObjectWriter(Writer):
    """A new object: sent in one request if it is short, else in parts. It appears whole, when it is closed."""

    def __init__(self, fs: ObjectStore, url: str, *, exclusive: bool) -> None:
        self._fs, self._url, self._exclusive = fs, url, exclusive
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._parts: Any = None
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if not self._open:
            raise StorageError(
                f"{self._url} is closed", got="a write", allowed="an open file", next_step="Create the file again."
            )
        piece = data if isinstance(data, bytes) else bytes(data)
        self._pending.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes > PART_BYTES:
            self._send()
        return len(piece)

    def sync(self) -> None:
        """Do nothing: what a store has is durable, and it has nothing of an object before `close`."""

    def close(self) -> None:
        if not self._open:
            return
        if self._parts is None:
            data = b"".join(self._pending)
            self._fs.put(self._url, data, exclusive=self._exclusive)
        else:
            self._send()
            if self._exclusive and self._fs.exists(self._url):
                self.abort()
                raise _taken(self._url)
            self._guarded(self._parts.close)
        self._end()

    def abort(self) -> None:
        if self._open and self._parts is not None:
            # An exception makes obstore abort the upload, and the store drop its parts.
            with suppress(Exception):  # abort never raises; a bucket's rule drops what stays
                self._parts.__exit__(RuntimeError, RuntimeError("abandoned"), None)
        self._end()

    def _send(self) -> None:
        if self._parts is None:
            self._parts = self._fs.open_parts(self._url)
        data = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        self._guarded(lambda: self._parts.write(data))

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            self.abort()
            raise translate(error, verb="write", place=self._url, whom=self._fs.whom) from error

    def _end(self) -> None:
        self._open, self._parts, self._pending = False, None, []


class ObjectStore(RemoteFileSystem, ConditionalWrites):
    """One bucket or container, by kind (s3, gs, az), name and settings.

    An attempt ends after `lockstep.storage.data-deadline-s`, all attempts of a call after `...give-up-s`. Before the
    first write, a few requests find out whether the store heeds conditions; one that does not is refused.
    """

    promises = Promises(atomic_rename=False, directories=False)
    calls_at_once = 16  # nothing of a range comes for a whole round trip, and the ranges of many lanes are short
    gap_bytes = 1 << 20

    def __init__(self, kind: str, bucket: str, settings: dict[str, str]) -> None:
        self._client, self._repeating = clients(kind, bucket, settings)
        self.whom = whom(kind, bucket, settings)
        self.call_deadline_s = seconds(settings, "lockstep.storage.call-deadline-s")
        self.data_deadline_s = seconds(settings, "lockstep.storage.data-deadline-s")
        self.give_up_s = seconds(settings, "lockstep.storage.give-up-s")
        self._probing = threading.Lock()
        self._trusted = False
        self._copies = True  # whether the store copies to a free name
        self._copying_here = threading.Lock()
        self._bare_tags = False  # whether it compares versions without the quotes around them

    @property
    def away(self) -> bool:
        return given_up(self.whom)

    # reading

    def raw(self, url: str, size: int, begin: int = 0) -> ObjectRaw:
        return ObjectRaw(self, url, size)

    def read_once(self, url: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, by one request."""
        import obstore

        try:
            data = self._call(
                lambda client: obstore.get_range(client, key(url), start=offset, length=length).to_bytes(), "read", url
            )
        except StorageError as error:
            if not _AFTER_THE_END.search(error.got):
                raise
            raise short_file(url, offset, length, self._file(url).size_bytes) from None
        if len(data) != length:
            raise short_file(url, offset, length, offset + len(data))
        return data

    def read_bytes(self, url: str) -> bytes:
        def read(client: Any) -> bytes:
            found = obstore.get(client, key(url))
            if found.meta["size"] > MAX_WHOLE_BYTES:
                raise CorruptionError(
                    "a file is longer than any of its kind",
                    file=url,
                    got=f"{found.meta['size']} bytes",
                    allowed=f"{MAX_WHOLE_BYTES} bytes at most",
                )
            return found.bytes().to_bytes()

        import obstore

        return self._call(read, "read", url)

    def list(self, url: str) -> Listing:
        import obstore

        prefix = key(url)
        found = self._call(lambda client: obstore.list_with_delimiter(client, prefix), "list", url)
        entries = [FileStat(join(url, _name(path)), _name(path), True, 0, 0) for path in found["common_prefixes"]]
        entries += [_stat(join(url, _name(one["path"])), one) for one in found["objects"] if one["path"] != prefix]
        if not entries and prefix:
            self._head(url)  # which raises NotFoundError
            raise StorageError(f"cannot list {url}", got="a file", allowed="a directory", next_step="Check the path.")
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, url: str) -> FileStat:
        return self._call(lambda client: self._stat_by(client, url), "find", url)

    def stat_once(self, url: str, deadline_s: float) -> FileStat:
        return self._once(lambda client: self._stat_by(client, url), "find", url)

    # writing

    def create(self, url: str, *, exclusive: bool = True) -> Writer:
        self._probe(url)
        if (exclusive and self.exists(url)) or (not exclusive and self._below(url, 1)):
            raise _taken(url)
        return ObjectWriter(self, url, exclusive=exclusive)

    def put(self, url: str, data: bytes, *, exclusive: bool) -> None:
        """Write a whole object; an exclusive one as `put_new`."""
        import obstore

        if exclusive:
            self.put_new(url, data)
        else:
            self._call(lambda client: obstore.put(client, key(url), data, use_multipart=False), "write", url)

    def put_new(self, url: str, data: bytes) -> None:
        """Write a file whose name must be free, by If-None-Match. Raises ExistsError if it is not."""
        self._probe(url)
        self._put_if(url, data, "create")

    def version(self, url: str) -> object | None:
        """The version of a file, for `put_over`; None if there is none."""
        try:
            found = self._call(lambda client: _head(client, url), "find", url)
        except NotFoundError:
            return None
        return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}

    def put_over(self, url: str, data: bytes, version: object) -> None:
        """Replace this version of a file, by If-Match. Raises ExistsError if it has another one, or is gone."""
        self._probe(url)
        self._put_version(url, data, version)

    def open_parts(self, url: str) -> Any:
        """Open an upload in parts, whose `close` makes the object appear."""
        import obstore

        return obstore.open_writer(self._repeating, key(url), buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def mkdirs(self, url: str, *, mode: int = 0o755) -> None:
        """Do nothing but refuse the name of a file: a directory is there as long as something is below it."""
        if key(url) and self._is_file(url):
            raise _taken(url)

    def delete(self, url: str, *, recursive: bool = False) -> bool:
        return self._delete(url, recursive, self.give_up_s)

    def discard(self, url: str) -> bool:
        try:
            return self._delete(url, True, _DISCARD_S)
        except LockstepError:
            return False  # a temporary file may stay; the caller has its first error to raise

    # renames

    def rename_new(self, src: str, dst: str) -> None:
        self._probe(dst)
        if self._below(dst, 1):
            raise _taken(dst)
        try:
            size = self._head(src).size_bytes
        except NotFoundError:
            if not self._below(src, 1):
                raise
            if f"{key(dst)}/".startswith(f"{key(src)}/"):
                raise StorageError(
                    f"cannot rename {src} to {dst}", got="a place below itself", allowed="another", next_step="Move it."
                ) from None
            if self._is_file(dst):
                raise _taken(dst) from None
            self.fill(src, dst)
            return
        self._copy(src, dst, size, new=True)
        self._drop([key(src)])

    def replace(self, src: str, dst: str) -> None:
        self._probe(dst)
        try:
            size = self._head(src).size_bytes
        except NotFoundError:
            if not self._below(src, 1):
                raise
            raise StorageError(
                f"{src} cannot replace {dst}", got="a directory", allowed="a file", next_step="Use rename_new."
            ) from None
        if self._below(dst, 1):
            raise _taken(dst)
        self._copy(src, dst, size, new=False)
        self._drop([key(src)])

    def fill(self, src: str, dst: str, before_marks: Callable[[], None] | None = None) -> None:
        """Copy the files of a directory to free names in another and delete them at `src`. COMPLETE_MARKS are copied
        last, after a call of `before_marks`, and deleted first.

        Without `before_marks`, what was copied is removed if this fails; a caller that has some decides itself.
        """
        source, target = key(src), key(dst)
        sizes = {str(entry["path"])[len(source) + 1 :]: int(entry["size"]) for entry in self._below(src)}
        marks = [name for name in COMPLETE_MARKS if name in sizes]
        others = sorted(set(sizes) - set(marks))
        done: list[str] = []

        def copy(name: str) -> None:
            self._copy(join(src, name), join(dst, name), sizes[name], new=True)
            done.append(name)

        try:
            for name in others[:1]:  # of two that copy to one name, the second finds it taken here
                copy(name)
            with ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="object-copy") as pool:
                list(pool.map(copy, others[1:]))
            if before_marks is not None:
                before_marks()
            for name in marks:
                copy(name)
        except BaseException:
            if before_marks is None:
                self._drop([f"{target}/{name}" for name in done])
            raise
        for some in (marks, others):
            self._drop([f"{source}/{name}" for name in some])

    def _copy(self, src: str, dst: str, size: int, *, new: bool) -> None:
        """Copy an object on the server; one that is too long for that through this process."""
        import obstore

        if size > COPY_LIMIT_BYTES:
            with self.open_read(src) as source, ObjectWriter(self, dst, exclusive=new) as writer:
                while data := source.read(PART_BYTES):
                    writer.write(data)
            return
        if new and not self._copies:
            with self._copying_here, self.open_read(src) as source:  # one file at a time is in memory
                self._put_if(dst, source.read(), "create")
            return
        attempts = 0

        def copy(client: Any) -> None:
            nonlocal attempts
            attempts += 1
            try:
                obstore.copy(client, key(src), key(dst), overwrite=not new)
            except obstore.exceptions.AlreadyExistsError:
                # The answer to an earlier attempt may have been lost; or another writer's file has come since.
                if attempts == 1 or int(_head(client, dst)["size"]) != size or not _equal(client, src, dst, size):
                    raise

        self._call(copy, "copy", f"{src} to {dst}")

    # one request

    def _put_if(self, url: str, data: bytes, condition: Any) -> None:
        import obstore

        attempts = 0

        def put(client: Any) -> None:
            nonlocal attempts
            attempts += 1
            try:
                obstore.put(client, key(url), data, mode=condition)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                # The answer to an earlier attempt may have been lost.
                if attempts == 1 or obstore.get(client, key(url)).bytes().to_bytes() != data:
                    raise

        self._call(put, "write", url)

    def _put_version(self, url: str, data: bytes, version: Any) -> None:
        if self._bare_tags:
            version = {name: value.strip('"') for name, value in version.items()}
        self._put_if(url, data, version)

    def _stat_by(self, client: Any, url: str) -> FileStat:
        try:
            if key(url):
                return _stat(url, _head(client, url))
        except FileNotFoundError:
            if not _below(client, url, 1):
                raise
        return FileStat(url, _name(key(url)), True, 0, 0)

    def _head(self, url: str) -> FileStat:
        return self._call(lambda client: _stat(url, _head(client, url)), "find", url)

    def _is_file(self, url: str) -> bool:
        try:
            self._head(url)
        except NotFoundError:
            return False
        return True

    def _below(self, url: str, most: int | None = None) -> Sequence[Any]:
        return self._call(lambda client: _below(client, url, most), "list", url)

    def _delete(self, url: str, recursive: bool, give_up_s: float) -> bool:
        def found(client: Any) -> tuple[bool, Sequence[Any]]:
            try:
                _head(client, url)
            except FileNotFoundError:
                return False, _below(client, url, None if recursive else 1)
            return True, ()

        is_file, entries = self._call(found, "find", url, give_up_s)
        if is_file:
            self._call(partial(_remove, [key(url)]), "delete", url, give_up_s)
            return True
        if not entries:
            return False
        if not recursive:
            raise StorageError(
                f"cannot delete {url}", got="a directory with files", allowed="a file", next_step="Delete them first."
            )
        paths = [str(entry["path"]) for entry in entries]
        marks = [path for path in paths if path in {f"{key(url)}/{mark}" for mark in COMPLETE_MARKS}]
        for some in (marks, sorted(set(paths) - set(marks))):  # without its mark it is no whole directory
            if some:
                self._call(partial(_remove, some), "delete", url, give_up_s)
        return True

    def _drop(self, paths: Sequence[str]) -> None:
        """Delete objects that are not needed any more; what cannot be deleted stays."""
        if paths:
            with suppress(LockstepError):
                self._call(partial(_remove, paths), "delete", paths[0])

    def _call(self, fn: Callable[[Any], T], verb: str, url: str, give_up_s: float | None = None) -> T:
        """Run `fn(client)` until it succeeds, fails for good, or the total time is over."""
        limit_s = self.give_up_s if give_up_s is None else give_up_s
        return with_retries(
            lambda _: self._once(fn, verb, url), what=f"`{verb} {url}`", whom=self.whom, give_up_s=limit_s
        )

    def _once(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        try:
            return fn(self._client)
        except (LockstepError, MemoryError):
            raise
        except Exception as error:
            raise translate(error, verb=verb, place=url, whom=self.whom) from error

    # conditions

    def _probe(self, url: str) -> None:
        """Find out whether the store heeds conditions, once, next to `url`. Raises StorageError if it does not."""
        if self._trusted:
            return
        with self._probing:
            if not self._trusted:
                nonces = secrets.token_hex(8), secrets.token_hex(8)
                self._ask_for_conditions(*(join(parent(url), f".conditions.{nonce}.tmp") for nonce in nonces))
            self._trusted = True

    def _ask_for_conditions(self, url: str, other: str) -> None:
        self._put_if(url, b"1", "create")
        try:
            self._try_copy(url, other)
            first = self.version(url)
            self._try_replacement(url, first)
            refusals: dict[str, Callable[[], None]] = {
                "a write of a new file (If-None-Match: *)": lambda: self._put_if(url, b"3", "create"),
                "a replacement of one version (If-Match)": lambda: self._put_version(url, b"4", first),
                "a copy to a new name (If-None-Match: *)": lambda: self._copy(url, other, 2, new=True),
            }
            for what, attempt in refusals.items():
                with suppress(ExistsError):
                    attempt()
                    raise _ignores(self.whom, f"success of {what} although there is another one")
        finally:
            self._drop([key(url), key(other)])

    def _try_copy(self, url: str, other: str) -> None:
        """Copy a file to a new name; where the store refuses such requests, files are copied through this process."""
        try:
            self._copy(url, other, 1, new=True)
        except StorageError as error:
            if "411 " not in error.got:  # of Ceph: the copy's request has no body, and no length of it
                raise
            self._copies = False
            self._copy(url, other, 1, new=True)

    def _try_replacement(self, url: str, version: object) -> None:
        """Replace a version; Ceph compares it without the quotes that RFC 9110 puts around it."""
        try:
            self._put_version(url, b"22", version)
        except ExistsError:
            self._bare_tags = True
            try:
                self._put_version(url, b"22", version)
            except ExistsError as error:
                refused = "refusal of a replacement of the version that is there (If-Match)"
                raise _ignores(self.whom, refused) from error


def key(url: str) -> str:
    """The name of an object in its bucket; "" for the bucket itself."""
    return re.sub("/+", "/", split_url(url)[2]).strip("/")


def _ignores(whom: str, got: str) -> StorageError:
    return StorageError(
        f"{whom} does not heed conditions, without which two writers would mix what they write",
        got=got,
        allowed="a store with conditional writes, such as S3 of Amazon, Google Cloud Storage or Azure Blob Storage",
        next_step="Choose another store, or update this one or the proxy in front of it.",
    )


def _taken(url: str) -> ExistsError:
    return ExistsError(
        f"{url}: the name is taken",
        got="an existing file or directory",
        allowed="a name that is free",
        next_step="Choose another name, or delete the existing one.",
    )


def _head(client: Any, url: str) -> Any:
    import obstore

    try:
        return obstore.head(client, key(url))
    except obstore.exceptions.PermissionDeniedError:
        # An answer to HEAD has no body that says whether the credentials are wrong or have expired; one to GET has.
        obstore.get(client, key(url))
        return obstore.head(client, key(url))


def _equal(client: Any, url: str, other: str, size: int) -> bool:
    """Whether the first `size` bytes of two objects are the same."""
    import obstore

    for start in range(0, size, PART_BYTES):
        part = {"start": start, "length": min(PART_BYTES, size - start)}
        if obstore.get_range(client, key(url), **part) != obstore.get_range(client, key(other), **part):
            return False
    return True


def _below(client: Any, url: str, most: int | None = None) -> Sequence[Any]:
    """The objects below a directory, `most` of them if not all."""
    import obstore

    prefix, found = key(url), list[Any]()
    chunks: Iterable[Sequence[Any]] = obstore.list(client, prefix, chunk_size=1000 if most is None else most + 1)
    for chunk in chunks:
        found += [entry for entry in chunk if entry["path"] != prefix]
        if most is not None and len(found) >= most:
            break
    return found


def _remove(paths: Sequence[str], client: Any) -> None:
    import obstore

    obstore.delete(client, list(paths))


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _stat(url: str, found: Any) -> FileStat:
    mtime_ms = int(found["last_modified"].timestamp() * 1000)
    return FileStat(url, _name(key(url)), False, int(found["size"]), mtime_ms)
