"""Keeps blocks of shards on a node's own disk, and checks each against its digests before use.

Decision 072.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.storage.errors import ConfigError

_POLL_S = 0.01  # flock itself waits for ever, or not at all
# DIR/lockstep-blocks/           mode 0700
#   lock                         its flock guards counting, renaming, removing; it holds the bytes in use (or more)
#   DATASET/.live                processes that read this dataset hold a shared flock on it
#   DATASET/ENTRY                one block; a use renews its mtime
#   DATASET/.tmp-NONCE           an entry that is being written; its writer holds its flock
FOLDER, LOCK, LIVE, TEMPORARY = "lockstep-blocks", "lock", ".live", ".tmp-"
LOCK_LIMIT_S = 5.0  # the lock is held for a scan at most, 4 us an entry; after this limit the block is not cached
_LOOK_AGAIN_S = 10.0  # after a scan that found nothing to remove
_FREED_SHARE = 0.1  # of the limit is freed at once, so that not every new block costs a scan
# An entry:
#   8 bytes         MAGIC
#   uint64, uint32  bytes of the block, bytes of a chunk of it (the last one may be shorter); little-endian
#   32 bytes        SHA-256 of dataset digest, shard, start and stop: an entry under another's name is invalid
#   32 bytes each   SHA-256 of each chunk
#   32 bytes        SHA-256 of all bytes before
#   the block, as stored in the shard
MAGIC = b"LSBLOCK1"
CHUNK_BYTES = 64 << 10  # the read of a window hashes up to two of them needlessly, 35 us each
_HEAD = struct.Struct("<8sQI")
_SHA_BYTES = 32
_USED_AGAIN_S = 5.0  # a use is recorded at most this often


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, unless another holder has it; whether it is locked. Closing the descriptor unlocks it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, limit_s: float, *, shared: bool = False) -> bool:
    """Repeat `try_lock` for up to `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(descriptor: int) -> None:
    """Release a lock, and keep the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: str) -> bool:
    """Whether a lock is held on a file; False if it is missing. Blocks other lockers while it checks."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def remove_unlocked(path: str) -> bool:
    """Remove a file unless a lock is held on it; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(descriptor):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    finally:
        os.close(descriptor)
    return True


class BusyError(Exception):
    """The lock could not be taken: its holder does not release it, or the folder was closed."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A temporary file of its full size; its flock is held while `descriptor` is open."""

    descriptor: int
    path: str


class CacheFolder:
    """Entries below `folder` of at most `limit_bytes` together, each with a dataset and a name.

    An entry may be removed if no living process reads its dataset; for datasets that this process reads (`reads`), if
    it was not used since `keep_since` (Unix time). The least recently used go first. Raises ConfigError for a folder
    that others may write, OSError for one that cannot be used. Thread-safe.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.root, self.limit_bytes = os.path.join(folder, FOLDER), limit_bytes
        self.keep_since = 0.0
        Path(folder).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.root, 0o700)
        status = os.lstat(self.root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"the cache {self.root} may be written by others",
                got=f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
                allowed=f"a directory of user {os.geteuid()} that no other user may write",
                next_step="Give --cache another folder, or correct the permissions.",
            )
        self._threads = threading.Lock()
        self._lock = os.open(os.path.join(self.root, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._live: dict[str, int] = {}
        self._full_until = 0.0
        with suppress(BusyError), self._locked():
            self._count(sum(size for _, size, _ in self._scan()))

    @property
    def full(self) -> bool:
        """Whether there was no room a moment ago, and no entry to remove."""
        return time.monotonic() < self._full_until

    def reads(self, dataset: str) -> None:
        """Declare that this process reads a dataset, so that other processes keep its entries."""
        with self._threads:
            if dataset in self._live:
                return
            entries = os.path.join(self.root, dataset)
            os.makedirs(entries, 0o700, exist_ok=True)
            descriptor = os.open(os.path.join(entries, LIVE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._live[dataset] = descriptor
            # Only a process that checks for readers holds this lock, for a moment. If it hangs meanwhile, others may
            # remove our entries, which only costs reads.
            wait_for_lock(descriptor, LOCK_LIMIT_S, shared=True)

    def path(self, dataset: str, name: str) -> str:
        """The path of an entry, which may be missing."""
        return os.path.join(self.root, dataset, name)

    def reserve(self, dataset: str, size: int) -> Reserved | None:
        """A file of `size` bytes to write an entry to; None if there is no room for it.

        Raises BusyError, OSError for a full disk.
        """
        if size > self.limit_bytes or self.full:
            return None
        with self._locked():
            used = self._used()
            if used + size > self.limit_bytes:
                used = self._make_room(size)
                if used + size > self.limit_bytes:
                    self._full_until = time.monotonic() + _LOOK_AGAIN_S
                    self._count(used)
                    return None
            self._count(used + size)  # first: a process killed here has counted too much, not too little
            path = os.path.join(self.root, dataset, TEMPORARY + secrets.token_hex(8))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                try_lock(descriptor)  # no other process can know of it yet
                os.posix_fallocate(descriptor, 0, size)
            except BaseException:
                self.give_up(Reserved(descriptor, path))
                raise
        return Reserved(descriptor, path)

    def publish(self, reserved: Reserved, dataset: str, name: str) -> None:
        """Make the written file an entry, atomically. Raises BusyError, OSError; the file is then still reserved."""
        with self._locked():  # a concurrent scan could miss both names, and count too little
            os.rename(reserved.path, self.path(dataset, name))
        os.close(reserved.descriptor)

    def give_up(self, reserved: Reserved) -> None:
        """Remove a reserved file."""
        with suppress(OSError):
            os.unlink(reserved.path)
        os.close(reserved.descriptor)

    def epoch_began(self, previous: float) -> None:
        """Allow the removal of entries that were not used since `previous`."""
        self.keep_since, self._full_until = previous, 0.0

    def close(self) -> None:
        """Release all locks. A second call does nothing."""
        with self._threads:
            for descriptor in (self._lock, *self._live.values()):
                if descriptor >= 0:
                    os.close(descriptor)
            self._live.clear()
            self._lock = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_LIMIT_S
        if not self._threads.acquire(timeout=LOCK_LIMIT_S):
            raise BusyError
        try:
            if self._lock < 0 or not wait_for_lock(self._lock, deadline - time.monotonic()):
                raise BusyError
            try:
                yield
            finally:
                unlock(self._lock)
        finally:
            self._threads.release()

    # The methods below are called with the lock held.

    def _used(self) -> int:
        """Bytes in use, or more: writers count before they add, and after they remove."""
        text = os.pread(self._lock, 32, 0)
        if text.isdigit():
            return int(text)
        return sum(size for _, size, _ in self._scan())

    def _count(self, used: int) -> None:
        os.pwrite(self._lock, f"{used:032d}".encode(), 0)

    def _scan(self) -> list[tuple[float, int, str]]:
        """Return (last use, bytes, path) of all entries and files that are being written; removes those of killed
        writers.
        """
        found = []
        for dataset in os.listdir(self.root):
            if dataset == LOCK:
                continue
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(os.path.join(self.root, dataset)) as items:
                for item in items:
                    if item.name == LIVE or (item.name.startswith(TEMPORARY) and remove_unlocked(item.path)):
                        continue
                    with suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        found.append((status.st_mtime, status.st_size, item.path))
        return found

    def _make_room(self, size: int) -> int:
        """Remove entries until `size` bytes fit; returns the bytes then in use."""
        found = self._scan()
        used = sum(length for _, length, _ in found)
        wanted = self.limit_bytes - max(size, int(_FREED_SHARE * self.limit_bytes))
        free: dict[str, bool] = {}
        for last_use, length, path in sorted(found):
            if used <= wanted:
                break
            folder, name = os.path.split(path)
            if name.startswith(TEMPORARY):
                continue
            if folder not in free:
                free[folder] = os.path.basename(folder) not in self._live and not is_locked(os.path.join(folder, LIVE))
            if free[folder] or (os.path.basename(folder) in self._live and last_use < self.keep_since):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= length
        return used


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockId:
    """Bytes start..stop-1 of a shard of the dataset with a digest."""

    dataset: str
    shard: str
    start: int
    stop: int

    @property
    def key(self) -> bytes:
        """The 32 bytes that identify the entry."""
        return hashlib.sha256(f"{self.dataset} {self.shard} {self.start} {self.stop}".encode()).digest()


@dataclass(slots=True)
class CacheCounts:
    """Counts of a process's cache: blocks and bytes served, blocks missed, added, and found damaged."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    kept: int = 0
    kept_bytes: int = 0
    damaged: int = 0


class BlockCache:
    """Blocks below `folder`, shared by all processes of this host, of at most `limit_bytes` together.

    A block that fails its digests is removed, logged, and counts as missing. If the disk is full or broken, no more
    blocks are added, with one warning. Safe for several threads and processes.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.folder = CacheFolder(folder, limit_bytes)
        self.counts = CacheCounts()
        self.failure: str | None = None
        """Why no more blocks are added: the disk is full or broken; None while they are."""
        self._off = False
        self._lock = threading.Lock()
        self._epochs = [0.0, time.time()]

    @property
    def keeps(self) -> bool:
        """Whether new blocks may be added."""
        return not self._off and not self.folder.full

    def reads(self, dataset: str) -> None:
        """Declare that this process reads a dataset, so that other processes keep its blocks."""
        try:
            self.folder.reads(_folder_of(dataset))
        except OSError as error:
            self._turn_off(error)

    def epoch_began(self) -> None:
        """Declare that this process has asked for each of its blocks once more. Blocks that were not used since the
        start of the epoch before may then be removed.
        """
        self._epochs.append(time.time())
        self.folder.epoch_began(self._epochs[-3] - 2 * _USED_AGAIN_S)

    def get(self, block: BlockId, start: int, stop: int) -> bytes | None:
        """Bytes start..stop-1 (counted in the shard) of a block; None if they are missing or damaged."""
        key = block.key
        path = self.folder.path(_folder_of(block.dataset), key.hex()[:40])
        try:
            # Opening a pipe of this name would wait for a writer for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = _read(descriptor, key, block.stop - block.start, start - block.start, stop - block.start)
            with suppress(OSError):  # in a read-only folder
                if found is not None and time.time() - os.fstat(descriptor).st_mtime > _USED_AGAIN_S:
                    os.utime(descriptor)
        except OSError as error:
            log.debug("%s: %s", path, error)
            found = None
        finally:
            os.close(descriptor)
        if found is None:
            self.add(damaged=1)
            self.drop(block, why="do not match their digest")
        return found

    def drop(self, block: BlockId, *, why: str) -> None:
        """Remove a block, and log it."""
        path = self.folder.path(_folder_of(block.dataset), block.key.hex()[:40])
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._turn_off(error)
            return
        log.warning(
            "the cached bytes %d to %d of %s %s: removed from %s, and read from the dataset again",
            block.start, block.stop, block.shard, why, path,
        )  # fmt: skip

    def put(self, block: BlockId, data: bytes | memoryview) -> bool:
        """Add a block; False if there is no room, or the disk fails."""
        if self._off:
            return False
        key, dataset = block.key, _folder_of(block.dataset)
        head = _head(key, data)
        reserved: Reserved | None = None
        try:
            reserved = self.folder.reserve(dataset, len(head) + len(data))
            if reserved is None:
                return False
            _write(reserved.descriptor, head, data)
            self.folder.publish(reserved, dataset, key.hex()[:40])
        except (BusyError, OSError) as error:
            if reserved is not None:
                self.folder.give_up(reserved)
            if isinstance(error, OSError):  # a busy lock costs only this block
                self._turn_off(error)
            return False
        self.add(kept=1, kept_bytes=len(data))
        return True

    def close(self) -> None:
        """Release the folder's locks."""
        self._off = True
        self.folder.close()

    def add(self, **numbers: int) -> None:
        """Add to `counts`."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self.counts, name, getattr(self.counts, name) + number)

    def _turn_off(self, error: OSError) -> None:
        with self._lock:
            first, self._off = not self._off, True
            self.failure = self.failure or error.strerror or str(error)
        if first:
            log.warning(
                "the cache %s adds no more blocks: %s; training continues, and reads them from the dataset",
                self.folder.root, error.strerror or error,
            )  # fmt: skip


def _folder_of(dataset: str) -> str:
    return hashlib.sha256(dataset.encode()).hexdigest()[:32]


def _head(key: bytes, data: bytes | memoryview) -> bytes:
    view = memoryview(data)
    chunks = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
    head = b"".join(
        [_HEAD.pack(MAGIC, len(view), CHUNK_BYTES), key, *(hashlib.sha256(chunk).digest() for chunk in chunks)]
    )
    return head + hashlib.sha256(head).digest()


def _write(descriptor: int, head: bytes, data: bytes | memoryview) -> None:
    at = 0
    for part in (memoryview(head), memoryview(data)):
        while part:
            written = os.pwrite(descriptor, part, at)
            part, at = part[written:], at + written


def _read(descriptor: int, key: bytes, size: int, start: int, stop: int) -> bytes | None:
    """Bytes start..stop-1 of an entry's block of `size` bytes; None if a digest or size does not match."""
    chunks = -(-size // CHUNK_BYTES)
    length = _HEAD.size + _SHA_BYTES * (chunks + 2)
    head = os.pread(descriptor, length, 0)
    sealed, seal = head[:-_SHA_BYTES], head[-_SHA_BYTES:]
    expected = _HEAD.pack(MAGIC, size, CHUNK_BYTES) + key
    if len(head) != length or not sealed.startswith(expected) or hashlib.sha256(sealed).digest() != seal:
        return None
    if os.fstat(descriptor).st_size != length + size:  # truncated, or longer
        return None
    first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
    begin = first * CHUNK_BYTES
    data = os.pread(descriptor, min(size, last * CHUNK_BYTES) - begin, length + begin)
    view = memoryview(data)
    for chunk in range(first, last):
        digest = sealed[len(expected) + chunk * _SHA_BYTES :][:_SHA_BYTES]
        if hashlib.sha256(view[chunk * CHUNK_BYTES - begin :][:CHUNK_BYTES]).digest() != digest:
            return None
    return data[start - begin : stop - begin]
