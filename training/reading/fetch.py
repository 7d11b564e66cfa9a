"""Bytes of a split's shards fetched ahead of their use: in the background, in large ranges, within one budget."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from lockstep.storage.errors import LockstepError, StorageError, StorageTimeoutError
from training.config import READ_AHEAD_BYTES
from training.reading.background import JOIN_S, end_at_exit

Buffer = bytes | memoryview


@dataclass(slots=True, eq=False)
class Range:
    """Bytes start..stop-1 of a shard; once it is `done`, its `data` or the `error` that reading them ended with."""

    shard: int
    start: int
    stop: int
    data: Buffer = b""
    error: BaseException | None = None
    done: bool = False
    forgotten: bool = False
    """Nobody will take it any more; on its way, it keeps its place in the budget until it has come."""
    used_bytes: int = 0

    @property
    def size(self) -> int:
        """How many bytes it has in the budget."""
        return self.stop - self.start


class HeldRanges:
    """Ranges of at most `budget_bytes` together, or a single larger one. Not safe for several threads at once."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        """Bytes that are on their way or there."""
        self.dropped = 0
        """Ranges that went before they were used up."""
        self._ranges: OrderedDict[int, Range] = OrderedDict()  # by id, oldest first
        self._of_shard: dict[int, list[Range]] = {}

    def __len__(self) -> int:
        return len(self._ranges)

    def room(self, size: int, *, urgent: bool) -> bool:
        """Whether so many bytes fit into the budget; where they are `urgent`, what lies there longest makes room."""
        while self.held_bytes and self.held_bytes + size > self.budget_bytes:
            oldest = next((found for found in self._ranges.values() if found.done), None) if urgent else None
            if oldest is None:
                return False
            self.dropped += 1
            self.remove(oldest)
        return True

    def begin(self, shard: int, start: int, stop: int) -> Range:
        """A range that will be read from now on."""
        found = Range(shard, start, stop)
        self._ranges[id(found)] = found
        self._of_shard.setdefault(shard, []).append(found)
        self.held_bytes += found.size
        return found

    def come(self, found: Range, data: Buffer, error: BaseException | None) -> None:
        """The end of a range's read."""
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
        """Bytes start..stop-1 of the shard, out of a range that has come; it goes once as many as it has were used."""
        found.used_bytes += stop - start
        if found.used_bytes >= found.size:
            self.remove(found)
        return memoryview(found.data)[start - found.start : stop - found.start]

    def remove(self, found: Range) -> None:
        """Let go of a range; nothing where that was done."""
        if self._ranges.pop(id(found), None) is None:
            return
        self._of_shard[found.shard].remove(found)
        found.forgotten = True
        if found.done:
            self.held_bytes -= found.size

    def clear(self) -> None:
        """Let go of all."""
        for found in list(self._ranges.values()):
            self.remove(found)


Key = tuple[int, int]
"""Shard and first record."""


@dataclass(slots=True, eq=False)
class Hint:
    """Records that will be read, and first and last byte of them (and one more) once that is known."""

    shard: int
    first: int
    count: int
    extent: tuple[int, int] | None = None
    asked: bool = False
    """Somebody looks for its extent."""

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.shard, self.first


class ReadHints:
    """A queue of hints; a reader that waits for one moves it to the front. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, Hint] = OrderedDict()
        self._urgent: Key | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, shard: int, first: int, count: int) -> bool:
        """Put records behind all others; False where those that begin there are in the queue."""
        if (shard, first) in self._queue:
            return False
        self._queue[shard, first] = Hint(shard, first, count)
        return True

    def urge(self, key: Key) -> bool:
        """Put a hint before all others, since a reader waits for it; False where there is none."""
        if key not in self._queue:
            return False
        self._queue.move_to_end(key, last=False)
        self._urgent = key
        return True

    def without_extent(self, among: int) -> Hint | None:
        """The first of the next `among` hints whose extent nobody knows or looks for."""
        return next((hint for hint in islice(self._queue.values(), among) if not hint.asked), None)

    def after(self, hint: Hint) -> Hint | None:
        """The hint of the records that go on from another's, if nobody has looked for its extent."""
        found = self._queue.get((hint.shard, hint.first + hint.count))
        return found if found is not None and not found.asked else None

    def drop(self, hint: Hint) -> None:
        """Take a hint out; nothing where that was done."""
        if self._queue.get(hint.key) is hint:
            self.discard(hint.key)

    def discard(self, key: Key) -> None:
        """Take out the hint of a key; nothing where there is none."""
        self._queue.pop(key, None)
        if self._urgent == key:
            self._urgent = None

    def clear(self) -> None:
        """Take all out."""
        self._queue.clear()
        self._urgent = None

    def next_range(self, ranges: HeldRanges, range_bytes: int) -> Range | None:
        """The next bytes to read, with their place among `ranges`: those of the first hint, and of its neighbours up to
        `range_bytes`. None where there are none, or no place.
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
            if hint.extent[0] != stop or longer > range_bytes or not ranges.room(longer, urgent=False):
                break
            self.drop(hint)
            stop, after = hint.extent[1], hint.first + hint.count
        return ranges.begin(head.shard, start, stop)


RANGE_BYTES = 4 << 20  # the most that neighbours are put together to: more gains nothing (docs/decisions/072)
SMALLEST_RANGE_BYTES = 128 << 10
THREADS = 4
SOON_A_THREAD = 4  # hints for which a thread looks up the bytes while others read
DEADLINE_S = 150.0  # more than one storage call may take in all, less than the feed waits for a batch


class Extents(Protocol):
    """What the fetcher asks of a shard; `extent` may read an index, and is called in any thread."""

    def extent(self, first_record: int, count: int) -> tuple[int, int]:
        """First byte of what must be read for some records, and the one after its last."""

    def records_read(self, first_record: int, count: int) -> tuple[int, int]:
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
        self._threads, self._deadline_s = threads, deadline_s
        self.range_bytes = min(RANGE_BYTES, max(1, budget_bytes // 4))
        self._lock = threading.Lock()
        self._come = threading.Condition(self._lock)  # for readers: bytes, or a failure
        self._work_there = threading.Condition(self._lock)  # for threads: hints, extents, room in the budget
        self._hints, self._ranges = ReadHints(), HeldRanges(budget_bytes)
        self._ahead = self._direct = self._fetched_bytes = 0
        self._waited_s = 0.0
        self._workers: list[threading.Thread] = []
        self._closed = False

    @property
    def counts(self) -> FetchCounts:
        """Numbers since the beginning."""
        with self._lock:
            return FetchCounts(self._ahead, self._direct, self._ranges.dropped, self._fetched_bytes, self._waited_s)

    @property
    def held_bytes(self) -> int:
        """Bytes that are on their way or held now."""
        return self._ranges.held_bytes

    def share_among(self, streams: int) -> None:
        """Cut ranges so small that each of `streams` places that are read in turn has two of them in the budget."""
        budget_bytes = self._ranges.budget_bytes
        share = max(SMALLEST_RANGE_BYTES, budget_bytes // (2 * max(1, streams)))
        self.range_bytes = max(1, min(RANGE_BYTES, budget_bytes // 4, share))

    def hint(self, shard: int, first: int, count: int) -> None:
        """Say that these records will be read, after what was said before. Returns at once."""
        first, count = self._shards[shard].records_read(first, count)
        with self._lock:
            if not self._closed and self._hints.add(shard, first, count):
                self._start()
                self._work_there.notify()

    def forget(self) -> None:
        """Drop all hints, and what was fetched for them: reading goes on elsewhere."""
        with self._lock:
            self._hints.clear()
            self._ranges.dropped += len(self._ranges)
            self._ranges.clear()
            self._work_there.notify()
            self._come.notify_all()

    def take(self, shard: int, first: int, count: int) -> tuple[Buffer, int]:
        """The bytes of some records, and where they begin in the shard.

        Raises what reading raises, StorageTimeoutError where bytes that are on their way do not come.
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
        """End the threads, without waiting for those that read: each ends with its read, which has a deadline."""
        with self._lock:
            self._closed = True
            self._hints.clear()
            self._ranges.clear()
            self._work_there.notify_all()
            self._come.notify_all()

    def close(self, limit_s: float = JOIN_S) -> None:
        """`stop`, and wait a little for the threads."""
        self.stop()
        end = time.monotonic() + limit_s
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, end - time.monotonic()))

    # Below, the lock is held, except in the threads while they read.

    def _fetched(self, key: Key, shard: int, start: int, stop: int, deadline: float) -> Buffer | None:
        """These bytes, where they were fetched ahead; None where they must be loaded alone."""
        found = self._await(key, shard, start, stop, deadline)
        if found is None:
            return None
        data = None
        if found.error is None:
            data = self._ranges.use(found, start, stop)
            self._ahead += 1
        else:
            self._ranges.remove(found)
        self._hints.discard(key)  # said again since: whoever reads these records now keeps what others need of them
        self._work_there.notify()  # there may be room in the budget now
        # All attempts at a storage that fails were made. Bytes that are wrong may be a neighbour's: we look at ours.
        if isinstance(found.error, StorageError) or not isinstance(found.error, LockstepError | None):
            raise found.error
        return data

    def _await(self, key: Key, shard: int, start: int, stop: int, deadline: float) -> Range | None:
        """The range that holds these bytes, finished; None where nobody fetches them."""
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
                    f"bytes {start} to {stop} of {self._name_of(shard)} did not come in {self._deadline_s:g} s",
                    got="a read that has not ended" if found is not None else f"{len(self._ranges)} reads before it",
                    allowed=f"a range of {self.range_bytes} bytes within {self._deadline_s:g} s",
                    next_step="Look at the file system's health (`python -m jobs.doctor`), then start again.",
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
        """Find the bytes of a hint and of those that go on from it, as far as a range may reach.

        Without the lock, since an index may have to be read; and told all at once, so that they come in one range.
        """
        placed: list[tuple[Hint, tuple[int, int] | None]] = []
        hint: Hint | None = first
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
                hint = self._hints.after(hint) if size < self.range_bytes else None
                if hint is not None:
                    hint.asked = True
        with self._lock:
            for told, place in placed:
                told.extent = place
                # A block that two lanes share is hinted at twice; the second time it is there or on its way.
                if place is None or self._ranges.covering(told.shard, *place) is not None:
                    self._hints.drop(told)
            self._work_there.notify()
            self._come.notify_all()

    def _read(self, job: Range) -> None:
        data: Buffer = b""
        error: BaseException | None = None
        try:
            data = self._load(job.shard, job.start, job.stop)
        except BaseException as caught:  # raised in the reader of these bytes, nowhere lost
            error = caught
        with self._lock:
            self._fetched_bytes += len(data)
            self._ranges.come(job, data, error)
            self._work_there.notify()
            self._come.notify_all()
