"""Upload of local files to HDFS: temporary name, comparison, rename; existing equal files are not sent again."""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import google_crc32c

from lockstep.storage.digest import digest_of
from lockstep.storage.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    ExistsError,
    NotFoundError,
    RetryableStorageError,
    StorageTimeoutError,
)
from lockstep.storage.files.deadlines import Backoff
from lockstep.storage.files.interface import FileStat, FileSystem, StoredChecksum
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.settings import write_give_up_s
from lockstep.storage.urls import absolute, basename, join, parent, split_url

_ALGORITHM = re.compile(r"MD5-of-(\d+)MD5-of-(\d+)CRC32C")
_HEADER = struct.Struct(">iq")  # bytes of a CRC, CRCs of an HDFS block (0 where the file has one block only)
_READ_BYTES = 1 << 22
_LEAST_BUFFER = 32
_ONE_BLOCK = 1 << 62
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.upload", re.DOTALL)
COPY_BYTES = 1 << 20
BY_CHECKSUM = "HDFS's checksum"
BY_READING = "SHA-256 of what was read back"
BY_LENGTH = "length (empty)"


def same_as(stored: StoredChecksum, file: BinaryIO) -> bool | None:
    """Whether `file`, from its current position to its end, has the checksum `stored`; None for an algorithm other than
    MD5 of CRC-32C, which is not implemented here.
    """
    found = _ALGORITHM.fullmatch(stored.algorithm)
    if found is None or len(stored.value) != _HEADER.size + 16:
        return None
    bytes_per_crc, crcs_per_block = _HEADER.unpack_from(stored.value)
    if not 0 < bytes_per_crc <= _READ_BYTES or crcs_per_block < 0:
        return None
    return file_checksum(file, bytes_per_crc, crcs_per_block) == stored.value[_HEADER.size :]


def file_checksum(file: BinaryIO, bytes_per_crc: int, crcs_per_block: int) -> bytes:
    """The 16 bytes of HDFS's MD5 of MD5s of CRC-32Cs; `crcs_per_block` is 0 for a file of one HDFS block. Memory does
    not depend on the file's size.
    """
    # Whole CRCs a piece and a block, so that only the file's end cuts one.
    piece_bytes = _READ_BYTES // bytes_per_crc * bytes_per_crc
    block_bytes = crcs_per_block * bytes_per_crc or _ONE_BLOCK
    md5s, block, left = b"", hashlib.md5(), block_bytes
    while data := file.read(min(piece_bytes, left)):
        starts = range(0, len(data), bytes_per_crc)
        crcs = [google_crc32c.value(data[start : start + bytes_per_crc]) for start in starts]
        block.update(struct.pack(f">{len(crcs)}I", *crcs))
        left -= len(data)
        if not left:
            md5s, block, left = md5s + block.digest(), hashlib.md5(), block_bytes
    if left < block_bytes:
        md5s += block.digest()
    buffer_bytes = _LEAST_BUFFER
    while buffer_bytes < len(md5s):
        buffer_bytes *= 2
    return hashlib.md5(md5s.ljust(buffer_bytes, b"\0")).digest()


@dataclass(frozen=True, slots=True)
class Item:
    """One file: its local path, the URL it shall have, its length in bytes."""

    path: str
    url: str
    size_bytes: int


@dataclass(slots=True)
class Survey:
    """The items by what exists at their targets: nothing, a file of equal length, a file of another length.

    `left_over` are temporary files of earlier uploads of the same items.
    """

    missing: list[Item] = field(default_factory=list)
    equal_length: list[Item] = field(default_factory=list)
    other_length: list[Item] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)


def temporary_name(url: str, nonce: str) -> str:
    """The hidden sibling under which a file is sent; `nonce` is 16 hex digits."""
    return join(parent(url), f".{basename(url)}.{nonce}.upload")


def find_files(inputs: Sequence[str], output: str) -> list[Item]:
    """The local files in order: a file goes to OUTPUT/ITS NAME, a folder's content to OUTPUT/PATH IN THE FOLDER.

    Raises NotFoundError for a missing input; ConfigError for an input that is not local, a link, pipe or device in a
    folder, a name that HDFS does not take, two files with one target.
    """
    items: dict[str, Item] = {}
    for given in inputs:
        if split_url(given)[0] != "file":
            raise ConfigError(
                f"--input {given} is not local",
                got=given,
                allowed="files and folders of this machine",
                next_step="lockstep etl_* read hdfs:// and webhdfs:// themselves; for a copy use `hadoop distcp`.",
            )
        source = absolute(given)
        fs = filesystem(source)
        status = fs.stat(source)
        files = _below(fs, source) if status.is_dir else [(basename(source), status)]
        for relative, file in files:
            item = Item(split_url(file.url)[2], join(output, relative), file.size_bytes)
            _check_name(relative, item.path)
            if item.url in items:
                raise ConfigError(
                    f"two files would become {item.url}",
                    got=f"{items[item.url].path} and {item.path}",
                    allowed="a target for each file",
                    next_step="Upload them to different outputs.",
                )
            items[item.url] = item
    if not items:
        raise NotFoundError(
            "there is nothing to upload",
            got="folders without files",
            allowed="a file or more",
            next_step="Check --input.",
        )
    return list(items.values())


def survey(fs: FileSystem, items: Sequence[Item], output: str) -> Survey:
    """Look at all targets, with one listing a directory. Raises ExistsError if the target of a file is a directory."""
    found, folders, wanted = Survey(), dict[str, dict[str, FileStat]](), dict[str, set[str]]()
    if fs.exists(output) and not fs.stat(output).is_dir:
        raise ExistsError(
            f"{output} is a file",
            got="a file",
            allowed="a directory, or a name that is free: files are put below it",
            next_step="Correct --output.",
        )
    for item in items:
        above, name = parent(item.url), basename(item.url)
        if above not in folders:
            folders[above], wanted[above] = _listing(fs, above), set()
        wanted[above].add(name)
        there = folders[above].get(name)
        if there is None:
            found.missing.append(item)
        elif there.is_dir:
            raise ExistsError(
                f"{item.url} is a directory, {item.path} is a file",
                got="a directory",
                allowed="a file, or a name that is free",
                next_step="Correct --output.",
            )
        else:
            (found.equal_length if there.size_bytes == item.size_bytes else found.other_length).append(item)
    for above, entries in folders.items():
        for entry in entries.values():
            matched = _TEMPORARY.fullmatch(entry.name)
            if matched is not None and matched["name"] in wanted[above] and not entry.is_dir:
                found.left_over.append(entry.url)
    return found


def _below(fs: FileSystem, folder: str) -> list[tuple[str, FileStat]]:
    found = []
    for entry in walk(fs, folder):
        if entry.is_special:
            raise ConfigError(
                f"{entry.url} is a symbolic link, pipe, socket or device",
                got="no plain file",
                allowed="files and directories",
                next_step="Pass its target as another --input, or remove it.",
            )
        found.append((entry.url.removeprefix(folder.rstrip("/") + "/"), entry))
    return sorted(found, key=lambda pair: pair[0])


def _check_name(relative: str, path: str) -> None:
    encodable = not any("\ud800" <= character <= "\udfff" for character in relative)
    if ":" in relative or not encodable or _TEMPORARY.fullmatch(basename("/" + relative)):
        raise ConfigError(
            f"{path!r} cannot have this name on HDFS",
            got=repr(relative),
            allowed="UTF-8 without colons, and not the form .NAME.16HEXDIGITS.upload, which uploads take for their own",
            next_step="Rename the file.",
        )


def _listing(fs: FileSystem, url: str) -> dict[str, FileStat]:
    try:
        return {entry.name: entry for entry in fs.list(url)}
    except NotFoundError:
        return {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for a file: sent, there (equal already) or replaced; and how its content was compared."""

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
    """Upload `items` below `output`, `parallel` files at a time; returns the outcome of each, in their order.

    A target with the same content is kept; one with another content raises ExistsError before anything is sent, or is
    replaced by one rename with `replace`. A file gets its name only after its content was compared with the local file;
    temporary files of earlier uploads are removed first.
    `on_bytes` gets counts that add up to the sizes of all items (negative ones before a file is sent again); it and
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
        """Call `step` for every item; at the first failure the others are stopped, and it is raised."""
        with ThreadPoolExecutor(parallel, thread_name_prefix="upload") as pool:
            futures: list[Future[Outcome | None]] = []
            try:
                futures += [pool.submit(step, item) for item in items]
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            except BaseException:  # Ctrl-C too: no thread may keep sending
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def compare(self, item: Item) -> Outcome | None:
        """Compare a target of equal length with the local file; None if they differ."""
        how = self._equal(item, item.url)
        if how is None:
            return None
        self._count(item.size_bytes)
        return self._reported(Outcome(item, "there", how))

    def send(self, item: Item, *, replace: bool) -> Outcome:
        """Send one file; after a failure of a DataNode or the NameNode, again under another name."""
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
                backoff.wait_or_raise(error, what=f"`upload {item.url}`", whom=self._fs.whom)
        try:
            how = self._equal(item, temporary)
            if how is None:
                raise _differs(item)
            (self._fs.replace if replace else self._fs.rename_new)(temporary, item.url)
        except BaseException:
            self._fs.discard(temporary)
            raise
        return self._reported(Outcome(item, "replaced" if replace else "sent", how))

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
        # No known checksum, or another one, as in an encryption zone: compare the bytes.
        local = self._digest(filesystem(item.path), item.path)
        return BY_READING if self._digest(self._fs, url) == local else None

    def _digest(self, fs: FileSystem, url: str) -> str:
        with fs.open_read(url) as file:
            return digest_of(_Stoppable(file, self._stopped)).sha256

    def _count(self, count: int) -> None:
        with self._lock:
            self._on_bytes(count)

    def _reported(self, outcome: Outcome) -> Outcome:
        with self._lock:
            self._on_done(outcome)
        return outcome


class _Stoppable:
    """Reads of `file` that raise _Stopped once the upload has failed in another thread."""

    def __init__(self, file: BinaryIO, stopped: threading.Event) -> None:
        self._file, self._stopped = file, stopped

    def read(self, size: int) -> bytes:
        if self._stopped.is_set():
            raise _Stopped
        return self._file.read(size)


class _Stopped(Exception):
    """Ends a thread after the upload has failed in another."""


def _taken(items: Sequence[Item]) -> ExistsError:
    more = f", and {len(items) - 1} more" if len(items) > 1 else ""
    return ExistsError(
        f"{items[0].url} exists with another content{more}",
        got=f"another length or digest than {items[0].path}",
        allowed="files that are equal (left alone) or missing",
        next_step="Choose another --output, delete the existing files, or pass --overwrite changed.",
    )


def _differs(item: Item) -> CorruptionError:
    return CorruptionError(
        "a file differs from the local one after it was sent",
        file=item.url,
        got="another digest",
        allowed=f"the digest of {item.path}",
        next_step="Run again when nothing writes to the local file; if it persists, check network and disks.",
    )
