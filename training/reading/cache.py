"""Blocks of shards kept on a node's own disk: each is held against its digests before any byte of it is used."""

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

_POLL_S = 0.01  # flock itself waits without end, or not at all


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file unless another holder is in the way; whether it is locked. Closing the descriptor unlocks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, limit_s: float, *, shared: bool = False) -> bool:
    """`try_lock` again and again, for up to `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock, and keep the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: str) -> bool:
    """Whether anybody holds a lock on a file; for that moment nobody else can take one. A missing file has none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def remove_unlocked(path: str) -> bool:
    """Remove a file that nobody holds a lock on; whether it is gone."""
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


# DIR/lockstep-blocks/           mode 0700
#   lock                         who holds its flock counts, names, removes; in it the bytes in use or more, in digits
#   DATASET/.live                processes that read this dataset hold a shared flock on it
#   DATASET/ENTRY                one block; a used one has its mtime renewed
#   DATASET/.tmp-NONCE           an entry that is being written: its writer holds its flock
FOLDER, LOCK, LIVE, TEMPORARY = "lockstep-blocks", "lock", ".live", ".tmp-"
LOCK_LIMIT_S = 5.0  # for the lock: it is held for a scan at most, 4 us an entry; beyond that a block is not cached
_LOOK_AGAIN_S = 10.0  # after a look that found nothing to remove
_FREED_SHARE = 0.1  # of the limit, so that not every new block costs a scan


class BusyError(Exception):
    """The lock was not to be had: its holder stands still, or the folder was closed meanwhile."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A temporary file of its full size; its flock is held as long as `descriptor` is open."""

    descriptor: int
    path: str


class CacheFolder:
    """Entries below `folder` of at most `limit_bytes` together, told by their dataset and a name.

    An entry may go if no living process reads its dataset; of those that this one reads (`reads`), if nobody used it
    since `keep_since`, seconds of the clock. What was used longest ago goes first. Raises ConfigError for a folder that
    others may write, OSError for one that cannot be used. Safe for several threads.
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
                allowed=f"a directory of user {os.geteuid()} that nobody else may write",
                next_step="Give --cache another folder, or mend the permissions.",
            )
        self._threads = threading.Lock()
        self._lock = os.open(os.path.join(self.root, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._live: dict[str, int] = {}
        self._full_until = 0.0
        with suppress(BusyError), self._locked():
            self._count(sum(size for _, size, _ in self._scan()))

    @property
    def full(self) -> bool:
        """Whether there was no room just now, and nothing that may go."""
        return time.monotonic() < self._full_until

    def reads(self, dataset: str) -> None:
        """Say that this process reads a dataset: other processes then leave its entries alone."""
        with self._threads:
            if dataset in self._live:
                return
            place = os.path.join(self.root, dataset)
            os.makedirs(place, 0o700, exist_ok=True)
            descriptor = os.open(os.path.join(place, LIVE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._live[dataset] = descriptor
            # Only a process that looks whether anyone lives is ever in the way, for a moment; where it stands still in
            # that, others may remove our entries, which costs reads and nothing else.
            wait_for_lock(descriptor, LOCK_LIMIT_S, shared=True)

    def path(self, dataset: str, name: str) -> str:
        """Where an entry is, or would be."""
        return os.path.join(self.root, dataset, name)

    def reserve(self, dataset: str, size: int) -> Reserved | None:
        """A file of `size` bytes to write an entry to; None where there is no room for it.

        Raises BusyError, OSError for a disk that has no room.
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
            self._count(used + size)  # before it lies there: who dies here has counted too much, not too little
            path = os.path.join(self.root, dataset, TEMPORARY + secrets.token_hex(8))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                try_lock(descriptor)  # nobody else can know of it yet
                os.posix_fallocate(descriptor, 0, size)
            except BaseException:
                self.give_up(Reserved(descriptor, path))
                raise
        return Reserved(descriptor, path)

    def publish(self, reserved: Reserved, dataset: str, name: str) -> None:
        """Make what was written an entry, in one step. Raises BusyError, OSError; it is then still reserved."""
        with self._locked():  # a scan that ran meanwhile could find neither name, and count too little
            os.rename(reserved.path, self.path(dataset, name))
        os.close(reserved.descriptor)

    def give_up(self, reserved: Reserved) -> None:
        """Remove what was reserved."""
        with suppress(OSError):
            os.unlink(reserved.path)
        os.close(reserved.descriptor)

    def epoch_began(self, previous: float) -> None:
        """Entries that were not used since `previous` may go."""
        self.keep_since, self._full_until = previous, 0.0

    def close(self) -> None:
        """Let go of all locks. A second call does nothing."""
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

    # Below, the lock is held.

    def _used(self) -> int:
        """Never less than what lies there: who adds counts first, who removes counts afterwards, if he lives."""
        text = os.pread(self._lock, 32, 0)
        if text.isdigit():
            return int(text)
        return sum(size for _, size, _ in self._scan())

    def _count(self, used: int) -> None:
        os.pwrite(self._lock, f"{used:032d}".encode(), 0)

    def _scan(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of all entries and of what is being written; what the dead left half is removed."""
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
        """Remove entries until `size` bytes fit; returns the bytes in use then."""
        found = self._scan()
        used = sum(length for _, length, _ in found)
        wanted = self.limit_bytes - max(size, int(_FREED_SHARE * self.limit_bytes))
        free: dict[str, bool] = {}
        for last_use, length, path in sorted(found):
            if used <= wanted:
                break
            place, name = os.path.split(path)
            if name.startswith(TEMPORARY):
                continue
            if place not in free:
                free[place] = os.path.basename(place) not in self._live and not is_locked(os.path.join(place, LIVE))
            if free[place] or (os.path.basename(place) in self._live and last_use < self.keep_since):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                used -= length
        return used


log = logging.getLogger(__name__)
# An entry:
#   8 bytes         MAGIC
#   uint64, uint32  bytes of the block, bytes of a chunk of it (the last one may be shorter); little-endian
#   32 bytes        SHA-256 of dataset digest, shard and place: an entry under another's name is none
#   32 bytes each   SHA-256 of each chunk
#   32 bytes        SHA-256 of all before
#   the block, as it lies in the shard
MAGIC = b"LSBLOCK1"
CHUNK_BYTES = 64 << 10  # a read of a window hashes up to two of them for nothing, 35 us each
_HEAD = struct.Struct("<8sQI")
_SHA_BYTES = 32
_USED_AGAIN_S = 5.0  # a use is written down so often at most


@dataclass(frozen=True, slots=True)
class BlockId:
    """Bytes start..stop-1 of a shard of a dataset, by its digest."""

    dataset: str
    shard: str
    start: int
    stop: int

    @property
    def key(self) -> bytes:
        """Its identity, 32 bytes."""
        return hashlib.sha256(f"{self.dataset} {self.shard} {self.start} {self.stop}".encode()).digest()


@dataclass(slots=True)
class CacheCounts:
    """What a process's cache did: blocks and bytes served, blocks that were not there, kept, and found damaged."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    kept: int = 0
    kept_bytes: int = 0
    damaged: int = 0


class BlockCache:
    """Blocks below `folder`, shared by all processes of this host, of at most `limit_bytes` together.

    What lies there is never believed: what fails its digests is removed, told in the log, and not there. A disk that is
    full or broken ends the keeping of new blocks, with one warning. Safe for several threads and processes.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.folder = CacheFolder(folder, limit_bytes)
        self.counts = CacheCounts()
        self._off = False
        self._lock = threading.Lock()
        self._epochs = [0.0, time.time()]

    @property
    def keeps(self) -> bool:
        """Whether a new block may be kept."""
        return not self._off and not self.folder.full

    def reads(self, dataset: str) -> None:
        """Say that blocks of a dataset will be asked for: other processes leave them alone."""
        try:
            self.folder.reads(_folder_of(dataset))
        except OSError as error:
            self._turn_off(error)

    def epoch_began(self) -> None:
        """Say that each block of this process has been asked for once more; what nobody used since the epoch before
        began may then be removed for others.
        """
        self._epochs.append(time.time())
        self.folder.epoch_began(self._epochs[-3] - 2 * _USED_AGAIN_S)

    def get(self, block: BlockId, start: int, stop: int) -> bytes | None:
        """Bytes start..stop-1 (counted in the shard) of a block; None where they are not there or were changed."""
        key = block.key
        path = self.folder.path(_folder_of(block.dataset), key.hex()[:40])
        try:
            # Opening a pipe that lies there would wait for a writer without end.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = _read(descriptor, key, block.stop - block.start, start - block.start, stop - block.start)
            with suppress(OSError):  # of a folder that can only be read
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
        """Remove a block, and say so."""
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
        """Keep a block; False where there is no room, or the disk does not take it."""
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
            if isinstance(error, OSError):  # a lock that is not to be had costs this block, a broken disk all
                self._turn_off(error)
            return False
        self.add(kept=1, kept_bytes=len(data))
        return True

    def close(self) -> None:
        """Let go of the folder's locks."""
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
        if first:
            log.warning(
                "the cache %s keeps no more blocks: %s; training goes on, and reads them from the dataset",
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
    """Bytes start..stop-1 of an entry's block of `size` bytes; None where anything that they rest on does not match."""
    chunks = -(-size // CHUNK_BYTES)
    length = _HEAD.size + _SHA_BYTES * (chunks + 2)
    head = os.pread(descriptor, length, 0)
    told, seal = head[:-_SHA_BYTES], head[-_SHA_BYTES:]
    expected = _HEAD.pack(MAGIC, size, CHUNK_BYTES) + key
    if len(head) != length or not told.startswith(expected) or hashlib.sha256(told).digest() != seal:
        return None
    if os.fstat(descriptor).st_size != length + size:  # torn, or grown
        return None
    first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
    begin = first * CHUNK_BYTES
    data = os.pread(descriptor, min(size, last * CHUNK_BYTES) - begin, length + begin)
    view = memoryview(data)
    for chunk in range(first, last):
        digest = told[len(expected) + chunk * _SHA_BYTES :][:_SHA_BYTES]
        if hashlib.sha256(view[chunk * CHUNK_BYTES - begin :][:CHUNK_BYTES]).digest() != digest:
            return None
    return data[start - begin : stop - begin]
