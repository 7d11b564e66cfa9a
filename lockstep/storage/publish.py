"""Atomic publication: a reader sees a complete file or directory or none, even if the writer dies.

On a disk and on HDFS a rename publishes. An object store has none: there a file is written on the condition that its
name is free or that its version has not changed, and a directory is copied to its name with the manifest last, which
makes it whole (decision 011).
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from lockstep.storage.digest import digest_of
from lockstep.storage.documents import canonical_bytes, sha256_hex
from lockstep.storage.errors import (
    CorruptionError,
    ExistsError,
    LockstepError,
    LostWriteError,
    NotFoundError,
    RetryableStorageError,
    StorageError,
    StorageTimeoutError,
)
from lockstep.storage.files.deadlines import Backoff
from lockstep.storage.files.interface import (
    COMPLETE_MARKS,
    MAX_WHOLE_BYTES,
    ConditionalWrites,
    FileStat,
    FileSystem,
    Writer,
)
from lockstep.storage.fs import walk
from lockstep.storage.settings import write_give_up_s
from lockstep.storage.urls import basename, join, parent

MANIFEST_NAME = "_manifest.json"
REPLACED_LIMIT_S, REPLACED_WAIT_S = 10.0, 0.02

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp")
CLAIM_NAME = "_publishing.json"
# A publication copies for seconds. Its writer may be paused as long as a machine is moved.
ABANDONED_AFTER_S = 600.0


def temporary_name(url: str) -> str:
    """A new hidden sibling of `url`, which neither Spark nor pyarrow takes for data."""
    return join(parent(url), f".{basename(url)}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether this is a name of `temporary_name`, such as of a file that a killed writer has left."""
    return _TEMPORARY.fullmatch(name) is not None


def write_file(
    fs: FileSystem,
    url: str,
    data: bytes,
    *,
    exclusive: bool = True,
    confirm: Callable[[], None] | None = None,
) -> None:
    """Publish `data` at `url`: temporary name, write, sync, close, rename, read back.

    `confirm` is as in `write_stream`. Raises ExistsError where `url` exists and `exclusive`; StorageError
    where it cannot be written, or reads back as other bytes.

    On an object store: one request, whose condition the server checks. It replaces only the version that was there
    before `confirm`; if another writer was faster, both steps are repeated. A new file is confirmed again afterwards,
    and deleted if that raises.
    """
    if isinstance(fs, ConditionalWrites):
        _put(fs, url, data, exclusive, confirm)
        return
    write_stream(fs, url, lambda writer: _write_all(writer, data), exclusive=exclusive, confirm=confirm)
    if not exclusive:
        return  # another writer may have replaced it since
    with read_back(url):
        written = fs.read_bytes(url)
    if written != data:
        what, wanted = (f"{len(one)} bytes, sha256 {sha256_hex(one)}" for one in (written, data))
        raise lost_write(url, what, wanted)


def _put(fs: ConditionalWrites, url: str, data: bytes, exclusive: bool, confirm: Callable[[], None] | None) -> None:
    end = time.monotonic() + REPLACED_LIMIT_S
    while True:
        version = None if exclusive else fs.version(url)
        if confirm is not None:
            confirm()
        try:
            if version is None:
                fs.put_new(url, data)
            else:
                fs.put_over(url, data, version)
            break
        except ExistsError as error:
            if exclusive:
                raise occupied(url) from None
            if time.monotonic() >= end:
                raise replaced_too_often(
                    url, f"another version before each write for {REPLACED_LIMIT_S:.3g} s"
                ) from error
        time.sleep(random.uniform(0.5, 1.0) * REPLACED_WAIT_S)
    if exclusive and confirm is not None:
        try:
            confirm()  # a writer that was paused before the request may have lost the right meanwhile
        except BaseException:
            fs.discard(url)
            raise


def replaced_too_often(url: str, got: str) -> StorageError:
    """The error for a file that others replace all the time."""
    return StorageError(
        f"{url} is replaced faster than it can be read",
        got=got,
        allowed="one version that lasts as long as a read",
        next_step="Find out what rewrites it; a driver does so every 5 s.",
    )


def lost_write(url: str, got: str, allowed: str) -> LostWriteError:
    """The error for a file that was just written and is not there, or has other bytes: it is the storage's fault."""
    return LostWriteError(
        f"{url} does not read back as it was written",
        got=got,
        allowed=allowed,
        next_step="Run again: it is written again. If this repeats, look for dead DataNodes or disks that fail"
        " (`hdfs dfsadmin -report`, `hdfs fsck`).",
    )


@contextmanager
def read_back(url: str) -> Iterator[None]:
    """A read of what was just written: that it is missing, short or torn becomes LostWriteError."""
    try:
        yield
    except (CorruptionError, NotFoundError) as error:
        raise lost_write(url, error.got or error.what, error.allowed or "the bytes that were written") from error


def write_stream(
    fs: FileSystem,
    url: str,
    produce: Callable[[Writer], None],
    *,
    exclusive: bool = True,
    give_up_s: float | None = None,
    confirm: Callable[[], None] | None = None,
) -> int:
    """Publish what `produce` writes; returns its length in bytes.

    After a temporary failure of the storage (a dead DataNode that the NameNode has not noticed, safe mode, a failover),
    `produce` is called again with a new temporary file, for `give_up_s` seconds (by default
    `settings.write_give_up_s()`, or `settings.give_up_s()` on an object store, which has no DataNodes to wait for): it
    must write the same bytes each time.

    `confirm` is called just before the rename, and raises if the file must no longer be published. A process that
    revokes that right and then calls `sweep_temporaries` can be sure that a writer which was paused after its `confirm`
    publishes nothing when it resumes: its rename finds no file.
    """
    if exclusive and fs.exists(url):
        raise occupied(url)
    if give_up_s is None and not isinstance(fs, ConditionalWrites):
        give_up_s = write_give_up_s()
    temporary, written = _write_temporary(fs, url, produce, Backoff(give_up_s))
    try:
        if confirm is not None:
            confirm()
        if exclusive:
            fs.rename_new(temporary, url)
        else:
            fs.replace(temporary, url)
    except ExistsError:
        fs.discard(temporary)
        raise occupied(url) from None
    except LockstepError:
        fs.discard(temporary)
        raise
    return written


def read_replaced(fs: FileSystem, url: str, within_s: float = REPLACED_LIMIT_S) -> bytes:
    """Read a whole file that others replace meanwhile (`write_file`, not exclusive): one version of it.

    HDFS answers for length and for blocks separately, so a read can give the start of a newer, longer version, or fail.
    Such a read is repeated. Raises NotFoundError where there is no file, what a read raises of a file that was not
    replaced meanwhile, and StorageError if it was replaced during each read for `within_s` seconds.
    """
    if isinstance(fs, ConditionalWrites):
        return fs.read_bytes(url)  # one request, which is answered with one version
    end, tries = time.monotonic() + within_s, 0
    while True:
        before = fs.stat(url)
        if before.is_dir or before.size_bytes > MAX_WHOLE_BYTES:
            return fs.read_bytes(url)  # which refuses it
        data, failure = b"", None
        try:
            with fs.open_read(url) as file:
                data = file.read()
        except (NotFoundError, CorruptionError) as error:
            failure = error
        tries += 1
        after = fs.stat(url)
        if _version(after) == _version(before):
            if failure is not None:
                raise failure
            if len(data) == after.size_bytes:
                return data
        if time.monotonic() >= end:
            raise replaced_too_often(
                url, f"another version after each of {tries} reads in {within_s:.3g} s"
            ) from failure
        time.sleep(REPLACED_WAIT_S)


def _version(found: FileStat) -> tuple[int, int]:
    return found.size_bytes, found.mtime_ms


def sweep_temporaries(fs: FileSystem, directory: str) -> None:
    """Delete all temporary files in a directory, so that their writers cannot publish them (see `write_stream`)."""
    try:
        entries = fs.list(directory)
    except NotFoundError:
        return
    for entry in entries:
        if not entry.is_dir and is_temporary(entry.name):
            fs.delete(entry.url)


def publish_directory(fs: FileSystem, staging_url: str, target_url: str) -> None:
    """Rename a finished directory to its final name, atomically, without temporary files: a writer that lost its
    NameNode could not remove its own.

    If the answer to the rename was lost, look at the directories: it succeeded if the staging directory is gone and the
    target has the same manifest. Raises ExistsError if the target is another one, NotFoundError if the staging
    directory is missing.

    An object store copies the files, after a claim on the target and with the manifest last.
    """
    ours = _manifest_of(fs, staging_url)
    for entry in walk(fs, staging_url, may_vanish=True):
        if is_temporary(entry.name):
            fs.delete(entry.url)
    if isinstance(fs, ConditionalWrites):
        _publish_by_copies(fs, staging_url, target_url)
    else:
        try:
            fs.rename_new(staging_url, target_url)
        except ExistsError:
            raise occupied(target_url) from None
        except NotFoundError:
            if ours is None or fs.exists(staging_url) or _manifest_of(fs, target_url) != ours:
                raise
    if ours is not None and _manifest_of(fs, target_url) != ours:
        raise StorageError(
            f"{target_url} does not have the manifest that was published",
            got="another manifest",
            allowed=f"the manifest of {staging_url}",
            next_step="Find out who else writes there; choose another output.",
        )


def refuse_occupied(fs: FileSystem, url: str) -> None:
    """Raise ExistsError if an output exists, unless it is what a killed publication has left on an object store."""
    if fs.exists(url) and (fs.promises.atomic_rename or not _abandoned(fs, url)):
        raise occupied(url)


def _publish_by_copies(fs: ConditionalWrites, staging: str, target: str) -> None:
    """Claim the target, copy all files there, the manifest last, and delete the claim.

    A claim that is older than ABANDONED_AFTER_S is replaced, which its writer notices before it writes the manifest,
    and the files that it has copied are deleted. If this fails, nothing stays.
    """
    where, claim = join(target, CLAIM_NAME), canonical_bytes({"from": staging, "nonce": secrets.token_hex(8)})
    if not fs.list(staging):  # which raises NotFoundError
        raise NotFoundError(f"{staging} is empty", got="no file", allowed="a file or more", next_step="Build it first.")
    if fs.exists(target):
        version = fs.version(where)
        if version is None or not _abandoned(fs, target):
            raise occupied(target)
        _take(partial(fs.put_over, where, claim, version), target)
        for entry in fs.list(target):
            if entry.name != CLAIM_NAME:
                fs.delete(entry.url, recursive=True)
    else:
        _take(partial(fs.put_new, where, claim), target)
        if any(entry.name != CLAIM_NAME for entry in fs.list(target)):
            # Another writer has published, and removed its claim, since this one looked.
            fs.discard(where)
            raise occupied(target)

    def check_claim() -> None:
        if fs.read_bytes(where) != claim:
            raise occupied(target)

    try:
        fs.fill(staging, target, before_marks=check_claim)
    except BaseException as error:
        try:
            check_claim()
        except LockstepError:
            pass  # another writer's claim: what is there is that one's
        else:
            fs.discard(target)
        if isinstance(error, ExistsError):
            raise occupied(target) from None
        raise
    fs.discard(where)


def _take(put: Callable[[], None], target: str) -> None:
    try:
        put()
    except ExistsError:
        raise occupied(target) from None  # another writer was faster


def _abandoned(fs: FileSystem, url: str) -> bool:
    """Whether a directory has an old claim and no manifest."""
    try:
        claimed_s = time.time() - fs.stat(join(url, CLAIM_NAME)).mtime_ms / 1000
        return claimed_s >= ABANDONED_AFTER_S and not any(fs.exists(join(url, mark)) for mark in COMPLETE_MARKS)
    except NotFoundError:
        return False


def occupied(url: str) -> ExistsError:
    """The error for an output that exists already."""
    return ExistsError(
        f"{url} exists already",
        got="an existing file or directory",
        allowed="a name that is free",
        next_step="Choose another output, or delete this one first.",
    )


def file_digest(fs: FileSystem, url: str) -> tuple[int, str]:
    """Length in bytes and SHA-256 (hex) of a file, read once, in constant memory."""
    with fs.open_read(url) as file:
        digest = digest_of(file)
    return digest.bytes, digest.sha256


class _Counting(Writer):
    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        self.bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self.bytes += self._inner.write(data)
        return len(data)

    def write_uncached(self, data: memoryview) -> int:
        self.bytes += self._inner.write_uncached(data)
        return len(data)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def _write_temporary(fs: FileSystem, url: str, produce: Callable[[Writer], None], backoff: Backoff) -> tuple[str, int]:
    while True:
        temporary = temporary_name(url)
        try:
            return temporary, _write_once(fs, temporary, produce)
        except (RetryableStorageError, StorageTimeoutError) as error:
            fs.discard(temporary)
            backoff.wait_or_raise(error, what=f"`write {url}`", whom=fs.whom)


def _write_once(fs: FileSystem, url: str, produce: Callable[[Writer], None]) -> int:
    writer = _Counting(fs.create(url))
    with writer:
        produce(writer)
        writer.sync()
    return writer.bytes


def _write_all(writer: Writer, data: bytes) -> None:
    writer.write(data)


def _manifest_of(fs: FileSystem, url: str) -> bytes | None:
    try:
        return fs.read_bytes(join(url, MANIFEST_NAME))
    except NotFoundError:
        return None
