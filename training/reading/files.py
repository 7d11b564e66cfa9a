"""The shards of a split as files that stay open between reads, used by several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cache
from typing import cast

import numpy as np

from lockstep.storage.files.interface import FileSystem, IntoMemory, RangeFile
from training.batches.buffer_pool import Slabs

MOST_OPEN = 64  # of files that no thread reads just now; a file of HDFS keeps where its blocks lie, a local one is open


class ShardFiles:
    """Reads ranges of shards, each by a file that no other thread uses; opening one costs a call to the NameNode."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._shards: list[tuple[FileSystem, str, int]] = []
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, tuple[int, RangeFile]] = OrderedDict()  # by id, the longest unused first
        self._closed = False
        self._slabs = Slabs()

    def add(self, fs: FileSystem, url: str, size_bytes: int) -> None:
        """The next shard, and how long it must be."""
        self._shards.append((fs, url, size_bytes))

    def url(self, shard: int) -> str:
        """Where a shard lies."""
        return self._shards[shard][1]

    def read(self, shard: int, start: int, stop: int, *, fresh: bool = False) -> bytes | memoryview:
        """Bytes start..stop-1 of a shard; `fresh`: by a file opened for them. Raises as RangeFile.read_at does."""
        fs, url, size = self._shards[shard]
        file = None if fresh else self._take(shard)
        if file is None:
            file = fs.open_ranges(url, size)
        try:
            data = self._data(file, start, stop)
        except BaseException:
            file.close()  # the next read opens it anew
            raise
        self._give_back(shard, file)
        return data

    def _data(self, file: RangeFile, start: int, stop: int) -> bytes | memoryview:
        if not _reads_into_memory(type(file)):
            return file.read_at(start, stop - start)
        # Memory that is used again: new memory for each range costs four times as much as what is read into it.
        memory = self._slabs.array((stop - start,), np.uint8).data
        cast(IntoMemory, file).read_into(start, memory)
        return memory.toreadonly()

    def close(self) -> None:
        """Close all that is not being read; what is, is closed after it."""
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


@cache  # looking through a protocol's methods costs as much as a short read
def _reads_into_memory(kind: type[RangeFile]) -> bool:
    return issubclass(kind, IntoMemory)
