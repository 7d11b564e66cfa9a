"""Local files to HDFS: each under a temporary name, compared, renamed; what is there already is not sent again."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import BinaryIO, cast

from lockstep.storage.errors import CorruptionError, DataError, ExistsError, RetryableStorageError, StorageTimeoutError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.retry import Backoff
from lockstep.storage.fs import filesystem
from lockstep.storage.hdfs_checksum import same_as
from lockstep.storage.settings import write_give_up_s
from lockstep.storage.upload_plan import Item, survey, temporary_name

COPY_BYTES = 1 << 20

BY_CHECKSUM = "HDFS's checksum"
BY_READING = "SHA-256 of what was read back"
BY_LENGTH = "length (empty)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a file: sent, there (equal already) or replaced; and how its content was compared."""

    item: Item
    done: str
    compared_by: str


def upload(
    items: Sequence[Item],
    output: str,
    *,
    replace: bool = False,
    parallel: int = 1,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Bring `items` below `output`, `parallel` files at a time; returns what became of each, in their order.

    A file that is there with the same content is left alone; one with another content raises ExistsError before
    anything is sent, or is replaced by one rename with `replace`. A file has its name only when its content was found
    equal to the local one's; temporary files that an earlier, ended upload of it has left are removed first.
    `on_bytes` gets counts that add up to the sizes of all items (negative ones where a file is sent anew); it and
    `on_done` are called by one thread at a time. Raises DataError for a file that changes while it is sent,
    CorruptionError for one that differs after it, StorageError where HDFS does not serve.
    """
    fs = filesystem(output)
    found = survey(fs, items, output)
    if found.other_length and not replace:
        raise _taken(found.other_length)
    for url in found.left_over:
        fs.delete(url)
    work = _Upload(fs, on_bytes, on_done)
    compared = work.all(work.compare, found.equal_length, parallel)
    changed = [item for item, same in zip(found.equal_length, compared, strict=True) if same is None]
    if changed and not replace:
        raise _taken(changed)
    old = {item.url for item in (*changed, *found.other_length)}
    missing = set(found.missing)
    to_send = [item for item in items if item.url in old or item in missing]
    sent = work.all(lambda item: work.send(item, replace=item.url in old), to_send, parallel)
    by_url = {outcome.item.url: outcome for outcome in (*compared, *sent) if outcome is not None}
    return [by_url[item.url] for item in items]


class _Upload:
    def __init__(self, fs: FileSystem, on_bytes: Callable[[int], None], on_done: Callable[[Outcome], None]) -> None:
        self._fs, self._on_bytes, self._on_done = fs, on_bytes, on_done
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def all(self, step: Callable[[Item], Outcome | None], items: Iterable[Item], parallel: int) -> list[Outcome | None]:
        """`step` of every item; at the first failure the others are stopped, and it is raised."""
        with ThreadPoolExecutor(parallel, thread_name_prefix="upload") as pool:
            futures: list[Future[Outcome | None]] = []
            try:
                futures += [pool.submit(step, item) for item in items]
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            except BaseException:  # Ctrl-C too: no thread goes on sending behind it
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def compare(self, item: Item) -> Outcome | None:
        """What lies at the target, of equal length, is the local file: else None."""
        how = self._equal(item, item.url)
        if how is None:
            return None
        self._count(item.size_bytes)
        return self._told(Outcome(item, "there", how))

    def send(self, item: Item, *, replace: bool) -> Outcome:
        """Send one file, anew under another name where a DataNode or the NameNode fails on the way."""
        backoff = Backoff(write_give_up_s())
        while True:
            temporary = temporary_name(item.url, secrets.token_hex(8))
            try:
                self._copy(item, temporary)
                break
            except (RetryableStorageError, StorageTimeoutError) as error:
                self._fs.discard(temporary)
                if self._stopped.is_set():
                    raise _Stopped from error
                backoff.wait_or_raise(error, what=f"`upload {item.url}`")
        try:
            how = self._equal(item, temporary)
            if how is None:
                raise _differs(item)
            (self._fs.replace if replace else self._fs.rename_new)(temporary, item.url)
        except BaseException:
            self._fs.discard(temporary)
            raise
        return self._told(Outcome(item, "replaced" if replace else "sent", how))

    def _copy(self, item: Item, temporary: str) -> None:
        counted = 0
        try:
            with filesystem(item.path).open_read(item.path) as source, self._fs.create(temporary) as writer:
                while data := source.read(COPY_BYTES):
                    if self._stopped.is_set():
                        raise _Stopped
                    writer.write(data)
                    counted += len(data)
                    self._count(len(data))
                if counted != item.size_bytes:
                    raise DataError(
                        f"{item.path} changed while it was sent",
                        got=f"{counted} bytes",
                        allowed=f"{item.size_bytes} bytes as at the start",
                        next_step="Run again when nothing writes to it.",
                    )
                writer.sync()
        except BaseException:
            self._count(-counted)
            raise

    def _equal(self, item: Item, url: str) -> str | None:
        """How the file at `url` was found equal to the local one; None where it is not."""
        if not item.size_bytes:
            return BY_LENGTH
        stored = self._fs.stored_checksum(url)
        if stored is not None:
            with filesystem(item.path).open_read(item.path) as source:
                if same_as(stored, cast("BinaryIO", _Stoppable(source, self._stopped))):
                    return BY_CHECKSUM
        # No checksum that is understood, or another one, as in an encryption zone: then the bytes themselves decide.
        local = self._digest(filesystem(item.path), item.path)
        return BY_READING if self._digest(self._fs, url) == local else None

    def _digest(self, fs: FileSystem, url: str) -> bytes:
        digest = hashlib.sha256()
        with fs.open_read(url) as file:
            source = _Stoppable(file, self._stopped)
            while data := source.read(COPY_BYTES):
                digest.update(data)
        return digest.digest()

    def _count(self, count: int) -> None:
        with self._lock:
            self._on_bytes(count)

    def _told(self, outcome: Outcome) -> Outcome:
        with self._lock:
            self._on_done(outcome)
        return outcome


class _Stoppable:
    """Reads of `file` that end with _Stopped when the upload has failed elsewhere."""

    def __init__(self, file: BinaryIO, stopped: threading.Event) -> None:
        self._file, self._stopped = file, stopped

    def read(self, size: int) -> bytes:
        if self._stopped.is_set():
            raise _Stopped
        return self._file.read(size)


class _Stopped(Exception):
    """Ends a thread whose upload has failed elsewhere."""


def _taken(items: Sequence[Item]) -> ExistsError:
    more = f", and {len(items) - 1} more" if len(items) > 1 else ""
    return ExistsError(
        f"{items[0].url} is there with another content{more}",
        got=f"another length or digest than {items[0].path}",
        allowed="files that are equal (left alone) or missing",
        next_step="Choose another --output, delete what is there, or say --overwrite changed.",
    )


def _differs(item: Item) -> CorruptionError:
    return CorruptionError(
        "a file differs from the local one after it was sent",
        file=item.url,
        got="another digest",
        allowed=f"the digest of {item.path}",
        next_step="Run again when nothing writes to the local file; if it persists, look at network and disks.",
    )
