"""Bytes of a split's shards fetched ahead of their use: in the background, in large ranges, within one budget."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.errors import LockstepError, StorageError, StorageTimeoutError

READ_AHEAD_BYTES = 64 << 20
RANGE_BYTES = 4 << 20  # the most that neighbours are put together to: more gains nothing (docs/decisions/072)
SMALLEST_RANGE_BYTES = 128 << 10
THREADS = 4
DEADLINE_S = 150.0  # more than one storage call may take in all, less than the feed waits for a batch
_JOIN_S = 5.0

Buffer = bytes | memoryview


class Extents(Protocol):
    """What the fetcher asks of a shard; `extent` may read an index, and is called in any thread."""

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of what must be read for some records, and the one after its last."""

    def unit(self, first_record: int, count: int) -> tuple[int, int]:
        """The records that are read for these: themselves, or the block that can only be read whole."""


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """What a fetcher did so far; `waited_s` is the time that readers stood still for bytes."""

    ahead: int
    """Reads whose bytes were there, or on their way."""
    direct: int
    """Reads of bytes that nobody had asked for ahead, or no more."""
    dropped: int
    """Ranges fetched and not used."""
    fetched_bytes: int
    waited_s: float


class _Hint:
    """Records that will be read, and their bytes once an extent is known."""

    __slots__ = ("asked", "count", "extent", "first", "shard")

    def __init__(self, shard: int, first: int, count: int) -> None:
        self.shard, self.first, self.count = shard, first, count
        self.asked = False
        self.extent: tuple[int, int] | None = None


class _Range:
    """Bytes start..stop-1 of a shard, on their way or there."""

    __slots__ = ("data", "done", "error", "forgotten", "shard", "start", "stop", "used")

    def __init__(self, shard: int, start: int, stop: int) -> None:
        self.shard, self.start, self.stop = shard, start, stop
        self.data: Buffer = b""
        self.error: BaseException | None = None
        self.done = self.forgotten = False
        self.used = 0


class BlockFetcher:
    """Fetches what `hint` says will be read, by `load(shard, start, stop)` in threads; `take` gives it out.

    At most `budget_bytes` are on their way or held (one range more where it alone is larger). `take` never waits for a
    hint that has no place in the budget: what lies there longest, and was passed over, goes. A failure to fetch ahead
    is raised by the `take` of its bytes; where it may be a neighbour's, the bytes are loaded again alone.
    """

    def __init__(
        self,
        shards: Sequence[Extents],
        load: Callable[[int, int, int], Buffer],
        *,
        name_of: Callable[[int], str],
        budget_bytes: int = READ_AHEAD_BYTES,
        threads: int = THREADS,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._shards, self._load, self._name_of = shards, load, name_of
        self.budget_bytes, self._threads, self._deadline_s = budget_bytes, threads, deadline_s
        self.range_bytes = min(RANGE_BYTES, max(1, budget_bytes // 4))
        self._lock = threading.Lock()
        self._come = threading.Condition(self._lock)  # for readers: bytes, or a failure
        self._work_there = threading.Condition(self._lock)  # for threads: hints, extents, room in the budget
        self._queue: OrderedDict[tuple[int, int], _Hint] = OrderedDict()  # by shard and first record
        self._ranges: OrderedDict[int, _Range] = OrderedDict()  # by id, oldest first
        self._of_shard: dict[int, list[_Range]] = {}
        self._urgent: tuple[int, int] | None = None
        self._held_bytes = self._ahead = self._direct = self._dropped = self._fetched_bytes = 0
        self._waited_s = 0.0
        self._workers: list[threading.Thread] = []
        self._closed = False

    @property
    def counts(self) -> FetchCounts:
        """Numbers since the beginning."""
        return FetchCounts(self._ahead, self._direct, self._dropped, self._fetched_bytes, self._waited_s)

    @property
    def held_bytes(self) -> int:
        """Bytes that are on their way or held now."""
        return self._held_bytes

    def share_among(self, streams: int) -> None:
        """Cut ranges so small that each of `streams` places that are read in turn has two of them in the budget."""
        share = max(SMALLEST_RANGE_BYTES, self.budget_bytes // (2 * max(1, streams)))
        self.range_bytes = max(1, min(RANGE_BYTES, self.budget_bytes // 4, share))

    def hint(self, shard: int, first: int, count: int) -> None:
        """Say that these records will be read, after what was said before. Returns at once."""
        first, count = self._shards[shard].unit(first, count)
        with self._lock:
            if self._closed or (shard, first) in self._queue:
                return
            self._queue[shard, first] = _Hint(shard, first, count)
            self._start()
            self._work_there.notify()

    def forget(self) -> None:
        """Drop all hints, and what was fetched for them: reading goes on elsewhere."""
        with self._lock:
            self._queue.clear()
            for found in list(self._ranges.values()):
                self._dropped += 1
                self._remove(found)
            self._work_there.notify()
            self._come.notify_all()

    def take(self, shard: int, first: int, count: int) -> tuple[Buffer, int]:
        """The bytes of some records, and where they begin in the shard.

        Raises what reading raises, StorageTimeoutError where bytes that are on their way do not come.
        """
        began = time.monotonic()
        key = (shard, self._shards[shard].unit(first, count)[0])
        if not self._workers:  # nothing was ever hinted
            return self._alone(shard, *self._shards[shard].extent(first, count))
        start, stop = self._shards[shard].extent(first, count)
        try:
            with self._lock:
                found = self._await(key, shard, start, stop, began + self._deadline_s)
                if found is not None:
                    data = self._use(found, start, stop)
                    if data is not None:
                        self._ahead += 1
                        return data, start
        finally:
            self._waited_s += time.monotonic() - began
        return self._alone(shard, start, stop)

    def stop(self) -> None:
        """End the threads, without waiting for those that read: each ends with its read, which has a deadline."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            for found in list(self._ranges.values()):
                self._remove(found)
            self._work_there.notify_all()
            self._come.notify_all()

    def close(self, limit_s: float = _JOIN_S) -> None:
        """`stop`, and wait a little for the threads."""
        self.stop()
        end = time.monotonic() + limit_s
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, end - time.monotonic()))

    def _alone(self, shard: int, start: int, stop: int) -> tuple[Buffer, int]:
        began = time.monotonic()
        data = self._load(shard, start, stop)
        self._waited_s += time.monotonic() - began
        self._direct += 1
        self._fetched_bytes += stop - start
        return data, start

    # Below, the lock is held, except in _work while it reads.

    def _await(self, key: tuple[int, int], shard: int, start: int, stop: int, deadline: float) -> _Range | None:
        """The range that holds these bytes, finished; None where nobody fetches them."""
        while True:
            found = self._covering(shard, start, stop)
            if found is not None and found.done:
                return found
            if found is None:
                hint = self._queue.get(key)
                if hint is None or self._closed:
                    return None
                self._queue.move_to_end(key, last=False)
                self._urgent = key
                self._work_there.notify()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._come.wait(left_s):
                raise StorageTimeoutError(
                    f"bytes {start} to {stop} of {self._name_of(shard)} did not come in {self._deadline_s:g} s",
                    got="a read that has not ended" if found is not None else f"{len(self._ranges)} reads before it",
                    allowed=f"a range of {self.range_bytes} bytes within {self._deadline_s:g} s",
                    next_step="Look at the file system's health (`python -m jobs.doctor`), then start again.",
                )

    def _covering(self, shard: int, start: int, stop: int) -> _Range | None:
        for found in self._of_shard.get(shard, ()):
            if found.start <= start and stop <= found.stop:
                return found
        return None

    def _use(self, found: _Range, start: int, stop: int) -> Buffer | None:
        """The bytes out of a finished range; None where they must be loaded alone, to see whose failure it is."""
        if found.error is not None:
            self._remove(found)
            self._work_there.notify()
            if isinstance(found.error, StorageError) or not isinstance(found.error, LockstepError):
                raise found.error
            return None
        data = memoryview(found.data)[start - found.start : stop - found.start]
        found.used += stop - start
        if found.used >= found.stop - found.start:
            self._remove(found)
            self._work_there.notify()
        return data

    def _remove(self, found: _Range) -> None:
        if self._ranges.pop(id(found), None) is None:
            return
        self._of_shard[found.shard].remove(found)
        found.forgotten = True
        if found.done:  # one on its way holds its place until it has come
            self._held_bytes -= found.stop - found.start

    def _start(self) -> None:
        if self._workers:
            return
        self._workers = [
            threading.Thread(target=self._work, name=f"block-fetch-{number}", daemon=True)
            for number in range(self._threads)
        ]
        for worker in self._workers:
            worker.start()
        _open.add(self)

    def _work(self) -> None:
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        return
                    hint = next((hint for hint in self._soon() if not hint.asked), None)
                    job = self._next_range()
                    if hint is not None or job is not None:
                        break
                    self._work_there.wait()
                if job is None:
                    assert hint is not None
                    hint.asked = True
                if self._queue:
                    self._work_there.notify()  # there may be more for another one
            if job is not None:
                self._read(job)
            elif hint is not None:
                self._place(hint)

    def _soon(self) -> list[_Hint]:
        """The hints that come next: their extents are asked for while others are read."""
        soon = []
        for number, hint in enumerate(self._queue.values()):
            if number == 4 * self._threads:
                break
            soon.append(hint)
        return soon

    def _place(self, first: _Hint) -> None:
        """Find the bytes of a hint and of those that go on from it, as far as a range may reach.

        Without the lock, since an index may have to be read; and told all at once, so that they come in one range.
        """
        placed: list[tuple[_Hint, tuple[int, int] | None]] = []
        hint: _Hint | None = first
        size = 0
        while hint is not None:
            try:
                extent = self._shards[hint.shard].extent(hint.first, hint.count)
            except BaseException:  # who reads these records asks again, and is told what is wrong
                placed.append((hint, None))
                break
            placed.append((hint, extent))
            size += extent[1] - extent[0]
            with self._lock:
                after = self._queue.get((hint.shard, hint.first + hint.count)) if size < self.range_bytes else None
                hint = after if after is not None and not after.asked else None
                if hint is not None:
                    hint.asked = True
        with self._lock:
            for told, place in placed:
                told.extent = place
                if place is None:
                    self._forget_hint(told)
            self._work_there.notify()
            self._come.notify_all()

    def _forget_hint(self, hint: _Hint) -> None:
        if self._queue.get((hint.shard, hint.first)) is hint:
            del self._queue[hint.shard, hint.first]

    def _next_range(self) -> _Range | None:
        """The next bytes to read, with their place in the budget; None where there are none, or no place."""
        head = next(iter(self._queue.values()), None)
        if head is None or head.extent is None:
            return None
        start, stop = head.extent
        if not self._room(stop - start, urgent=self._urgent == (head.shard, head.first)):
            return None
        self._forget_hint(head)
        after = head.first + head.count
        while (hint := self._queue.get((head.shard, after))) is not None and hint.extent is not None:
            longer = hint.extent[1] - start
            if hint.extent[0] != stop or longer > self.range_bytes or not self._room(longer, urgent=False):
                break
            self._forget_hint(hint)
            stop, after = hint.extent[1], hint.first + hint.count
        self._urgent = None if self._urgent == (head.shard, head.first) else self._urgent
        found = _Range(head.shard, start, stop)
        self._ranges[id(found)] = found
        self._of_shard.setdefault(head.shard, []).append(found)
        self._held_bytes += stop - start
        return found

    def _room(self, size: int, *, urgent: bool) -> bool:
        """Whether so many bytes fit into the budget; for those that a reader waits for, older ones make room."""
        while self._held_bytes and self._held_bytes + size > self.budget_bytes:
            oldest = next((found for found in self._ranges.values() if found.done), None) if urgent else None
            if oldest is None:
                return False
            self._dropped += 1
            self._remove(oldest)
        return True

    def _read(self, job: _Range) -> None:
        data: Buffer = b""
        error: BaseException | None = None
        try:
            data = self._load(job.shard, job.start, job.stop)
        except BaseException as caught:  # raised in the reader of these bytes, nowhere lost
            error = caught
        with self._lock:
            job.data, job.error, job.done = data, error, True
            self._fetched_bytes += len(job.data)
            if job.forgotten:
                self._held_bytes -= job.stop - job.start
                job.data = b""
            self._work_there.notify()
            self._come.notify_all()


_open: weakref.WeakSet[BlockFetcher] = weakref.WeakSet()


def _close_all() -> None:
    # A thread that comes back from native code while the interpreter is torn down ends the process by an abort.
    end = time.monotonic() + _JOIN_S
    for fetcher in list(_open):
        fetcher.stop()
    for fetcher in list(_open):
        fetcher.close(max(0.0, end - time.monotonic()))


atexit.register(_close_all)
