"""Blocks of shards kept on a node's own disk: each is held against its digests before any byte of it is used."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from training.reading.cache_folder import BusyError, CacheFolder, Reserved

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
class BlockPlace:
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

    def get(self, place: BlockPlace, start: int, stop: int) -> bytes | None:
        """Bytes start..stop-1 (counted in the shard) of a block; None where they are not there or were changed."""
        key = place.key
        path = self.folder.path(_folder_of(place.dataset), key.hex()[:40])
        try:
            # Opening a pipe that lies there would wait for a writer without end.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = _read(descriptor, key, place.stop - place.start, start - place.start, stop - place.start)
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
            self.drop(place, why="do not match their digest")
        return found

    def drop(self, place: BlockPlace, *, why: str) -> None:
        """Remove a block, and say so."""
        path = self.folder.path(_folder_of(place.dataset), place.key.hex()[:40])
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._turn_off(error)
            return
        log.warning(
            "the cached bytes %d to %d of %s %s: removed from %s, and read from the dataset again",
            place.start, place.stop, place.shard, why, path,
        )  # fmt: skip

    def put(self, place: BlockPlace, data: bytes | memoryview) -> bool:
        """Keep a block; False where there is no room, or the disk does not take it."""
        if self._off:
            return False
        key, dataset = place.key, _folder_of(place.dataset)
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
