"""Fetches bytes of shards ahead of their use: in the background, in large ranges, within one budget."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from lockstep.storage.errors import LockstepError, StorageError, StorageTimeoutError
from lockstep.storage.files.interface import FileSystem
from lockstep.training.config import READ_AHEAD_BYTES
from lockstep.training.reading.background import JOIN_S, end_at_exit
from lockstep.training.reading.stretches import Stretches

Buffer = bytes | memoryview
RANGE_BYTES = 4 << 20  # the most that neighbours are merged to: more gains nothing (decision 072)
SMALLEST_RANGE_BYTES = 128 << 10
SOON_A_THREAD = 4  # hints a thread whose extents are looked up ahead of their reads
DEADLINE_S = 150.0  # longer than a storage call may take, shorter than the feed waits for a batch


@dataclass(slots=True, eq=False)
class Range:
    """Bytes start..stop-1 of a shard; once `done`, with their `data` or the `error` of the read."""

    shard: int
    start: int
    stop: int
    data: Buffer = b""
    error: BaseException | None = None
    done: bool = False
    forgotten: bool = False
    """No longer wanted. If its read still runs, it counts in the budget until the read ends."""
    used_bytes: int = 0

    @property
    def size(self) -> int:
        """The range's bytes in the budget."""
        return self.stop - self.start


class HeldRanges:
    """Ranges of at most `budget_bytes` together, or a single larger one. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        """Bytes that are being read or have been read."""
        self.dropped = 0
        """Ranges that were removed before they were used up."""
        self._ranges: OrderedDict[int, Range] = OrderedDict()  # by id, oldest first
        self._of_shard: dict[int, list[Range]] = {}

    def __len__(self) -> int:
        return len(self._ranges)

    def room(self, size: int, *, urgent: bool) -> bool:
        """Whether `size` bytes fit into the budget; for `urgent` ones the oldest finished ranges are removed."""
        while self.held_bytes and self.held_bytes + size > self.budget_bytes:
            oldest = next((found for found in self._ranges.values() if found.done), None) if urgent else None
            if oldest is None:
                return False
            self.dropped += 1
            self.remove(oldest)
        return True

    def begin(self, shard: int, start: int, stop: int) -> Range:
        """Add a range whose read starts now."""
        found = Range(shard, start, stop)
        self._ranges[id(found)] = found
        self._of_shard.setdefault(shard, []).append(found)
        self.held_bytes += found.size
        return found

    def finish(self, found: Range, data: Buffer, error: BaseException | None) -> None:
        """Record the end of a range's read."""
        found.done = True
        if found.forgotten:
            self.held_bytes -= found.size
        else:
            found.data, found.error = data, error

    def covering(self, shard: int, start: int, stop: int) -> Range | None:
        """The range that holds, or will hold, these bytes."""
        for found in self._of_shard.get(shard, ()):
            if found.start <= start and stop <= found.stop:
                return found
        return None

    def use(self, found: Range, start: int, stop: int) -> Buffer:
        """Bytes start..stop-1 of the shard from a finished range, which is removed once all its bytes were used."""
        found.used_bytes += stop - start
        if found.used_bytes >= found.size:
            self.remove(found)
        return memoryview(found.data)[start - found.start : stop - found.start]

    def remove(self, found: Range) -> None:
        """Remove a range; does nothing if it was removed before."""
        if self._ranges.pop(id(found), None) is None:
            return
        self._of_shard[found.shard].remove(found)
        found.forgotten = True
        if found.done:
            self.held_bytes -= found.size

    def clear(self) -> None:
        """Remove all ranges."""
        for found in list(self._ranges.values()):
            self.remove(found)


Key = tuple[int, int]
"""Shard and first record."""


@dataclass(slots=True, eq=False)
class Hint:
    """Records that will be read, and, once known, their first byte and the byte after their last."""

    shard: int
    first: int
    count: int
    extent: tuple[int, int] | None = None
    apart: bool = False
    """One read cannot fetch it together with the records before."""
    asked: bool = False
    """A thread is looking for its extent."""

    @property
    def key(self) -> Key:
        """The range's key in the queue."""
        return self.shard, self.first


class ReadHints:
    """A queue of hints; a reader that waits for one moves it to the front. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, Hint] = OrderedDict()
        self._urgent: Key | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, shard: int, first: int, count: int) -> bool:
        """Append records; False if a hint with the same first record is in the queue."""
        if (shard, first) in self._queue:
            return False
        self._queue[shard, first] = Hint(shard, first, count)
        return True

    def urge(self, key: Key) -> bool:
        """Move a hint to the front, since a reader waits for it; False if there is none."""
        if key not in self._queue:
            return False
        self._queue.move_to_end(key, last=False)
        self._urgent = key
        return True

    def without_extent(self, among: int) -> Hint | None:
        """The first of the next `among` hints whose extent no thread has looked for."""
        return next((hint for hint in islice(self._queue.values(), among) if not hint.asked), None)

    def after(self, hint: Hint) -> Hint | None:
        """The hint of the records that follow another's, if no thread has looked for its extent."""
        found = self._queue.get((hint.shard, hint.first + hint.count))
        return found if found is not None and not found.asked else None

    def drop(self, hint: Hint) -> None:
        """Remove a hint; does nothing if it was removed before."""
        if self._queue.get(hint.key) is hint:
            self.discard(hint.key)

    def discard(self, key: Key) -> None:
        """Remove the hint of a key, if there is one."""
        self._queue.pop(key, None)
        if self._urgent == key:
            self._urgent = None

    def clear(self) -> None:
        """Remove all hints."""
        self._queue.clear()
        self._urgent = None

    def next_range(self, ranges: HeldRanges, range_bytes: int) -> Range | None:
        """The next range to read, added to `ranges`: the bytes of the first hint, and of its neighbours up to
        `range_bytes`, unless these take several reads, which are left to other threads. None if there is no hint, or
        no room in the budget.
        """
        head = next(iter(self._queue.values()), None)
        if head is None or head.extent is None:
            return None
        start, stop = head.extent
        if not ranges.room(stop - start, urgent=self._urgent == head.key):
            return None
        self.drop(head)
        after = head.first + head.count
        while (hint := self._queue.get((head.shard, after))) is not None and hint.extent is not None:
            longer = hint.extent[1] - start
            if hint.apart or hint.extent[0] != stop or longer > range_bytes or not ranges.room(longer, urgent=False):
                break
            self.drop(hint)
            stop, after = hint.extent[1], hint.first + hint.count
        return ranges.begin(head.shard, start, stop)


class Extents(Protocol):
    """A shard, as the fetcher uses it; `extent` may read an index, and is called in any thread."""

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte to be read for some records, and the byte after the last."""

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
        """First record and number of the records that are read for these: themselves, or their whole block."""

    @property
    def stretches(self) -> Stretches:
        """The parts of the file that extents count."""


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """What a fetcher did so far; `waited_s` is the time that readers waited for bytes."""

    ahead: int
    """Reads whose bytes had been fetched, or were being fetched."""
    direct: int
    """Reads of bytes that were not hinted at, or dropped."""
    dropped: int
    """Ranges fetched and not used."""
    fetched_bytes: int
    waited_s: float


class BlockFetcher:
    """Fetches the records that `hint` announces, with `load(shard, start, stop)` in threads; `take` returns them.

    At most `budget_bytes` are held or being fetched (more only for a single larger range). `take` never waits for room
    in the budget: the oldest range that was not used makes room. `take` raises the error of a failed fetch of its
    bytes; if a neighbour in the range may have caused it, `take` loads its bytes again without the neighbour.
    """

    def __init__(
        self,
        shards: Sequence[Extents],
        load: Callable[[int, int, int], Buffer],
        *,
        name_of: Callable[[int], str],
        budget_bytes: int = READ_AHEAD_BYTES,
        threads: int = FileSystem.calls_at_once,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._shards, self._load, self._name_of = shards, load, name_of
        self._threads, self._deadline_s = threads, deadline_s
        self.range_bytes = min(RANGE_BYTES, max(1, budget_bytes // 4))
        self._lock = threading.Lock()
        self._come = threading.Condition(self._lock)  # readers wait here for bytes or a failure
        self._work_there = threading.Condition(self._lock)  # threads wait here for hints, extents, room in the budget
        self._hints, self._ranges = ReadHints(), HeldRanges(budget_bytes)
        self._ahead = self._direct = self._fetched_bytes = 0
        self._waited_s = 0.0
        self._workers: list[threading.Thread] = []
        self._closed = False

    @property
    def counts(self) -> FetchCounts:
        """The counts so far."""
        with self._lock:
            return FetchCounts(self._ahead, self._direct, self._ranges.dropped, self._fetched_bytes, self._waited_s)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held or being fetched now."""
        return self._ranges.held_bytes

    def share_among(self, streams: int) -> None:
        """Limit ranges so that each of `streams` streams, which are read in turn, has room for two in the budget."""
        budget_bytes = self._ranges.budget_bytes
        share = max(SMALLEST_RANGE_BYTES, budget_bytes // (2 * max(1, streams)))
        self.range_bytes = max(1, min(RANGE_BYTES, budget_bytes // 4, share))

    def hint(self, shard: int, first: int, count: int) -> None:
        """Announce records that will be read, after those of earlier hints. Returns at once."""
        first, count = self._shards[shard].records_read(first, count)
        with self._lock:
            if not self._closed and self._hints.add(shard, first, count):
                self._start()
                self._work_there.notify()

    def forget(self) -> None:
        """Drop all hints and the bytes fetched for them, since reading continues elsewhere."""
        with self._lock:
            self._hints.clear()
            self._ranges.dropped += len(self._ranges)
            self._ranges.clear()
            self._work_there.notify()
            self._come.notify_all()

    def take(self, shard: int, first: int, count: int) -> tuple[Buffer, int]:
        """The bytes of some records, and their first byte in the shard.

        Raises what reading raises, StorageTimeoutError if a fetch of these bytes does not end.
        """
        began = time.monotonic()
        start, stop = self._shards[shard].extent(first, count)
        key = (shard, self._shards[shard].records_read(first, count)[0])
        try:
            with self._lock:
                data = self._fetched(key, shard, start, stop, began + self._deadline_s)
            if data is None:
                data = self._load(shard, start, stop)
                with self._lock:
                    self._direct += 1
                    self._fetched_bytes += len(data)
            return data, start
        finally:
            with self._lock:
                self._waited_s += time.monotonic() - began

    def stop(self) -> None:
        """End the threads, without waiting for those that read: each ends after its read, which has a deadline."""
        with self._lock:
            self._closed = True
            self._hints.clear()
            self._ranges.clear()
            self._work_there.notify_all()
            self._come.notify_all()

    def close(self, limit_s: float = JOIN_S) -> None:
        """Call `stop`, and wait up to `limit_s` seconds for the threads."""
        self.stop()
        end = time.monotonic() + limit_s
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, end - time.monotonic()))

    # The methods below hold the lock, except the threads while they read.

    def _fetched(self, key: Key, shard: int, start: int, stop: int, deadline: float) -> Buffer | None:
        """Return these bytes if they were fetched ahead; None if they must be loaded now."""
        found = self._await(key, shard, start, stop, deadline)
        if found is None:
            return None
        data = None
        if found.error is None:
            data = self._ranges.use(found, start, stop)
            self._ahead += 1
        else:
            self._ranges.remove(found)
        self._hints.discard(key)  # hinted at again since: the reader of these records keeps what others need of them
        self._work_there.notify()  # there may be room in the budget now
        # A failing storage was retried enough. Wrong bytes may be a neighbour's, so ours are loaded again.
        if isinstance(found.error, StorageError) or not isinstance(found.error, LockstepError | None):
            raise found.error
        return data

    def _await(self, key: Key, shard: int, start: int, stop: int, deadline: float) -> Range | None:
        """Wait for the range that holds these bytes; None if no thread fetches them."""
        while True:
            found = self._ranges.covering(shard, start, stop)
            if found is not None and found.done:
                return found
            if found is None:
                if self._closed or not self._hints.urge(key):
                    return None
                self._work_there.notify()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._come.wait(left_s):
                raise StorageTimeoutError(
                    f"bytes {start} to {stop} of {self._name_of(shard)} were not read within {self._deadline_s:g} s",
                    got="a read that still runs" if found is not None else f"{len(self._ranges)} reads before it",
                    allowed=f"a range of {self.range_bytes} bytes within {self._deadline_s:g} s",
                    next_step="Look at the file system's health (`lockstep doctor`), then start again.",
                )

    def _start(self) -> None:
        if self._workers:
            return
        self._workers = [
            threading.Thread(target=self._work, name=f"block-fetch-{number}", daemon=True)
            for number in range(self._threads)
        ]
        for worker in self._workers:
            worker.start()
        end_at_exit(self)

    def _work(self) -> None:
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        return
                    hint = self._hints.without_extent(SOON_A_THREAD * self._threads)
                    job = self._hints.next_range(self._ranges, self.range_bytes)
                    if hint is not None or job is not None:
                        break
                    self._work_there.wait()
                if job is None:
                    assert hint is not None
                    hint.asked = True
                if self._hints:
                    self._work_there.notify()  # there may be more for another one
            if job is not None:
                self._read(job)
            elif hint is not None:
                self._find_extents(hint)

    def _find_extents(self, first: Hint) -> None:
        """Look up the bytes of a hint and of the hints that follow it, up to the size of a range.

        The lock is not held meanwhile, since an index may have to be read. All extents are set at once, so that one
        range covers them.
        """
        extents: list[tuple[Hint, tuple[int, int] | None]] = []
        hint: Hint | None = first
        size = 0
        while hint is not None:
            try:
                extent = self._shards[hint.shard].extent(hint.first, hint.count)
            except BaseException:  # the reader of these records calls `extent` again, and gets the error
                extents.append((hint, None))
                break
            extents.append((hint, extent))
            size += extent[1] - extent[0]
            with self._lock:
                hint = self._hints.after(hint) if size < self.range_bytes else None
                if hint is not None:
                    hint.asked = True
        with self._lock:
            for found, found_extent in extents:
                found.extent = found_extent
                if found_extent is not None:
                    found.apart = not self._shards[found.shard].stretches.in_one(*found_extent)
                # A block that two lanes share is hinted at twice; the second time it is fetched already.
                if found_extent is None or self._ranges.covering(found.shard, *found_extent) is not None:
                    self._hints.drop(found)
            self._work_there.notify()
            self._come.notify_all()

    def _read(self, job: Range) -> None:
        data: Buffer = b""
        error: BaseException | None = None
        try:
            data = self._load(job.shard, job.start, job.stop)
        except BaseException as caught:  # raised by the `take` of these bytes
            error = caught
        with self._lock:
            self._fetched_bytes += len(data)
            self._ranges.finish(job, data, error)
            self._work_there.notify()
            self._come.notify_all()
