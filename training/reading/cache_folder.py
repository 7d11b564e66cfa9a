"""A folder of cached blocks that several processes share: bounded in total, whatever any of them does or dies of."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.storage.errors import ConfigError
from training.reading.file_lock import is_locked, remove_unlocked, try_lock, unlock, wait_for_lock

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
