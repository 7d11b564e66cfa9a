"""The shards of a split as open files that several threads read."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np

from lockstep.storage.errors import StorageTimeoutError
from lockstep.storage.files.interface import FileSystem, IntoMemory, RangeFile
from lockstep.training.reading.buffer_pool import Slabs
from lockstep.training.reading.cache import BlockCache, BlockId
from lockstep.training.reading.stretches import Stretches

MOST_OPEN = 64  # idle files; an HDFS file keeps the locations of its blocks, a local one a descriptor
_WAIT_S = 120.0  # for a block that another thread reads: longer than a storage call may take


class ShardFiles:
    """Reads ranges of shards, each with a file that no other thread uses; opening one costs a call to the NameNode."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._shards: list[tuple[FileSystem, str, int, Stretches]] = []
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, tuple[int, RangeFile]] = OrderedDict()  # by id, least recently used first
        self._closed = False
        self._slabs = Slabs()

    def add(self, fs: FileSystem, url: str, size_bytes: int, stretches: Stretches | None = None) -> None:
        """Add the next shard, which must have this size; only its `stretches` are read (None: all of it)."""
        self._shards.append((fs, url, size_bytes, stretches or Stretches.whole(size_bytes)))

    def url(self, shard: int) -> str:
        """The URL of a shard."""
        return self._shards[shard][1]

    def read(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        """Packed bytes start..stop-1 of a shard's stretches; `fresh` opens the file again. Raises as RangeFile.read_at
        does.
        """
        fs, url, size, stretches = self._shards[shard]
        file = None if fresh else self._take(shard)
        if file is None:
            file = fs.open_ranges(url, size)
        try:
            data = self._data(file, list(stretches.ranges(start, stop)))
        except BaseException:
            file.close()  # the next read opens it again
            raise
        self._give_back(shard, file)
        return data

    def _data(self, file: RangeFile, ranges: Sequence[tuple[int, int]]) -> bytes | memoryview:
        """The bytes of ranges of a file (first byte, length), end to end."""
        if not _reads_into_memory(type(file)):
            return b"".join(file.read_at(offset, length) for offset, length in ranges)
        # Reused memory: new memory for each range would cost four times as much as the read into it.
        memory, at = self._slabs.array((sum(length for _, length in ranges),), np.uint8).data, 0
        for offset, length in ranges:
            cast(IntoMemory, file).read_into(offset, memory[at : at + length])
            at += length
        return memory.toreadonly()

    def close(self) -> None:
        """Close all idle files; one that is being read is closed after the read."""
        with self._lock:
            self._closed = True
            idle = list(self._idle.values())
            self._idle.clear()
        for _, file in idle:
            file.close()

    def _take(self, shard: int) -> RangeFile | None:
        with self._lock:
            for key, (owner, file) in reversed(self._idle.items()):
                if owner == shard:
                    del self._idle[key]
                    return file
        return None

    def _give_back(self, shard: int, file: RangeFile) -> None:
        surplus: RangeFile | None = file
        with self._lock:
            if not self._closed:
                self._idle[id(file)] = (shard, file)
                surplus = self._idle.popitem(last=False)[1][1] if len(self._idle) > self._most_open else None
        if surplus is not None:
            surplus.close()


@cache  # checking a class against a protocol costs as much as a short read
def _reads_into_memory(kind: type[RangeFile]) -> bool:
    return issubclass(kind, IntoMemory)


@dataclass(frozen=True, slots=True)
class CachedShard:
    """The identity of a shard in the cache: the digest of its dataset, its path there, the edges of its blocks (n + 1
    rising offsets, packed), and the parts of it that are read.
    """

    dataset: str
    path: str
    edges: Sequence[int]
    stretches: Stretches | None = None
    """None: all of it."""

    @property
    def name(self) -> str:
        """The path, and which parts of the shard its blocks are made of."""
        if self.stretches is None or self.stretches.is_whole:
            return self.path
        return f"{self.path}#{self.stretches.name}"


class CachedBytes:
    """Reads shards like ShardFiles, and keeps whole blocks in a cache, so that each is read from the dataset once.

    `epoch_bytes`: about how many bytes this process asks for in one epoch.
    """

    def __init__(self, files: ShardFiles, cache: BlockCache) -> None:
        self._files, self.cache = files, cache
        self._shards: list[CachedShard] = []
        self._under_way: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        self._asked_bytes = 0
        self.epoch_bytes = 0

    def add(self, shard: CachedShard) -> None:
        """Add the next shard."""
        self._shards.append(shard)
        self.cache.reads(shard.dataset)

    def read(self, shard: int, start: int, stop: int) -> bytes | memoryview:
        """Bytes start..stop-1 of a shard. Raises what ShardFiles.read raises."""
        blocks = self._blocks(shard, start, stop)
        if not blocks:
            return self._files.read(shard, start, stop)
        found = {block: self._cached(shard, block, start, stop) for block in blocks}
        missing = [block for block, data in found.items() if data is None]
        fetched: list[int] = []
        if missing:
            self._claim(shard, missing)
            try:
                fetched = self._fill(shard, start, stop, found)
            finally:
                with self._changed:
                    self._under_way.difference_update((shard, block) for block in missing)
                    self._changed.notify_all()
        self._count(stop - start)
        pieces = [data for data in found.values() if data is not None]
        hit_bytes = sum(len(data) for block, data in found.items() if data is not None and block not in fetched)
        self.cache.add(hits=len(blocks) - len(fetched), hit_bytes=hit_bytes, misses=len(fetched))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def drop(self, shard: int, start: int, stop: int) -> None:
        """Remove blocks that match their digests but are wrong: they were already wrong when the dataset was read."""
        for block in self._blocks(shard, start, stop):
            self.cache.drop(self._block_id(shard, block), why="do not fit the records' checksums")

    def _blocks(self, shard: int, start: int, stop: int) -> range:
        edges = self._shards[shard].edges
        if not edges or start < edges[0] or stop > edges[-1] or start >= stop:
            return range(0)
        return range(bisect_right(edges, start) - 1, bisect_left(edges, stop))

    def _block_id(self, shard: int, block: int) -> BlockId:
        own = self._shards[shard]
        return BlockId(own.dataset, own.name, int(own.edges[block]), int(own.edges[block + 1]))

    def _cached(self, shard: int, block: int, start: int, stop: int) -> bytes | None:
        block_id = self._block_id(shard, block)
        return self.cache.get(block_id, max(start, block_id.start), min(stop, block_id.stop))

    def _claim(self, shard: int, blocks: Sequence[int]) -> None:
        """Wait until no other thread reads any of these blocks, then claim them all at once, so that no two threads
        wait for each other.
        """
        keys = {(shard, block) for block in blocks}
        deadline = time.monotonic() + _WAIT_S
        with self._changed:
            while keys & self._under_way:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise StorageTimeoutError(
                        f"a block of {self._files.url(shard)} was not read within {_WAIT_S:g} s",
                        got="a read by another thread still runs",
                        allowed="the block",
                        next_step="Look at the file system's health (`lockstep doctor`), then start again.",
                    )
            self._under_way |= keys

    def _fill(self, shard: int, start: int, stop: int, found: dict[int, bytes | None]) -> list[int]:
        """Read the missing blocks from the dataset, neighbours in one read, and keep them; returns these blocks."""
        for block, data in found.items():
            if data is None:  # another thread may have read it since
                found[block] = self._cached(shard, block, start, stop)
        missing = fetched = [block for block, data in found.items() if data is None]
        while missing:
            count = 1
            while count < len(missing) and missing[count] == missing[0] + count:
                count += 1
            self._fetch(shard, start, stop, missing[:count], found)
            missing = missing[count:]
        return fetched

    def _fetch(self, shard: int, start: int, stop: int, blocks: list[int], found: dict[int, bytes | None]) -> None:
        block_ids = [self._block_id(shard, block) for block in blocks]
        begin, end = block_ids[0].start, block_ids[-1].stop
        keeps = self.cache.keeps  # asked once: a block that is cut off here cannot be kept below
        if not keeps:  # reading whole blocks would gain nothing
            begin, end = max(begin, start), min(end, stop)
        data = memoryview(self._files.read(shard, begin, end))
        for block, block_id in zip(blocks, block_ids, strict=True):
            if keeps:
                self.cache.put(block_id, data[block_id.start - begin : block_id.stop - begin])
            found[block] = bytes(data[max(start, block_id.start) - begin : min(stop, block_id.stop) - begin])

    def _count(self, size: int) -> None:
        with self._changed:
            self._asked_bytes += size
            ended = 0 < self.epoch_bytes <= self._asked_bytes
            self._asked_bytes -= self.epoch_bytes if ended else 0
        if ended:
            self.cache.epoch_began()
