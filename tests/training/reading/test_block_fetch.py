"""Bytes fetched ahead: those that were asked for, within the budget, and never waited for without end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lockstep.storage.errors import CorruptionError, StorageError, StorageTimeoutError
from lockstep.training.reading.fetch import BlockFetcher
from lockstep.training.reading.stretches import Stretches

RECORD = 10
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8))


class Shard:
    """Records of ten bytes."""

    stretches = Stretches.whole(len(CONTENT))

    def records_read(self, first: int, count: int) -> tuple[int, int]:
        return first, count

    def extent(self, first: int, count: int) -> tuple[int, int]:
        return RECORD * first, RECORD * (first + count)


class Store:
    """Loads slowly where it is told to; counts what it is asked for, and the most that is asked for at one time."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Callable[[int, int, int], Exception | None] = lambda shard, start, stop: None

    def load(self, shard: int, start: int, stop: int) -> bytes:
        self.loads.append((shard, start, stop))
        assert self.gate.wait(120)
        error = self.fails(shard, start, stop)
        if error is not None:
            raise error
        return CONTENT[start:stop]


@contextmanager
def fetching(store: Store, **options: float) -> Iterator[BlockFetcher]:
    fetcher = BlockFetcher([Shard(), Shard()], store.load, name_of="shard {}".format, **options)  # type: ignore[arg-type]  # a table's numbers
    try:
        yield fetcher
    finally:
        store.gate.set()
        fetcher.close()


def bytes_of(fetcher: BlockFetcher, first: int, count: int, shard: int = 0) -> bytes:
    data, start = fetcher.take(shard, first, count)
    assert start == RECORD * first
    return bytes(data)


def settled(fetcher: BlockFetcher, loads: int, store: Store) -> None:
    end = time.monotonic() + 120
    while len(store.loads) < loads:
        assert time.monotonic() < end, store.loads
        time.sleep(0.001)
    time.sleep(0.02)  # for more than there should be


def test_neighbours_come_in_one_range_and_others_alone() -> None:
    store = Store()
    store.gate.clear()
    with fetching(store, budget_bytes=4000, threads=1) as fetcher:  # ranges of up to 1000 bytes
        fetcher.hint(1, 0, 1)  # the thread waits here while the others come together
        settled(fetcher, 1, store)
        for first in (5, 15, 25, 60):
            fetcher.hint(0, first, 10)
        fetcher.hint(0, 35, 80)  # a neighbour, but with it a range would be too long
        store.gate.set()
        for first, count in ((5, 10), (15, 10), (25, 10), (60, 10), (35, 80)):
            assert bytes_of(fetcher, first, count) == CONTENT[RECORD * first :][: RECORD * count]
        assert store.loads == [(1, 0, 10), (0, 50, 350), (0, 600, 700), (0, 350, 1150)]
        assert fetcher.counts.ahead == 5 and fetcher.counts.direct == 0
        assert fetcher.held_bytes == RECORD  # the first hint's, which nobody took


def test_a_read_that_nobody_hinted_at_is_read_alone_and_a_part_of_a_hint_comes_from_its_range() -> None:
    store = Store()
    with fetching(store, budget_bytes=4000) as fetcher:
        assert bytes_of(fetcher, 3, 2) == CONTENT[30:50]
        fetcher.hint(0, 10, 10)
        settled(fetcher, 2, store)
        assert bytes_of(fetcher, 12, 3) == CONTENT[120:150]
        assert bytes_of(fetcher, 18, 4) == CONTENT[180:220]  # beyond the hint
        assert store.loads == [(0, 30, 50), (0, 100, 200), (0, 180, 220)]


def test_bytes_that_are_there_or_on_their_way_are_not_loaded_again_for_a_second_hint() -> None:
    store = Store()
    store.gate.clear()
    with fetching(store, budget_bytes=4000, threads=1) as fetcher:
        fetcher.hint(0, 10, 10)
        settled(fetcher, 1, store)
        fetcher.hint(0, 10, 10)  # on their way
        fetcher.hint(0, 40, 10)
        store.gate.set()
        settled(fetcher, 2, store)
        fetcher.hint(0, 40, 10)  # there
        assert bytes_of(fetcher, 10, 10) == CONTENT[100:200]
        assert bytes_of(fetcher, 40, 10) == CONTENT[400:500]
        fetcher.hint(0, 60, 10)
        assert bytes_of(fetcher, 60, 10) == CONTENT[600:700]  # the only thread has gone through all hints
        assert store.loads == [(0, 100, 200), (0, 400, 500), (0, 600, 700)]
        assert fetcher.held_bytes == fetcher.counts.dropped == 0


@pytest.mark.parametrize("streams", [1, 50])
def test_the_budget_holds_and_all_hints_come_in_their_order(streams: int) -> None:
    store = Store()
    most = 0
    with fetching(store, budget_bytes=2000, threads=3) as fetcher:
        fetcher.share_among(streams)
        for first in range(0, 3000, 20):
            fetcher.hint(first // 20 % 2, first, 20)
        for first in range(0, 3000, 20):
            most = max(most, fetcher.held_bytes)
            assert bytes_of(fetcher, first, 20, first // 20 % 2) == CONTENT[RECORD * first :][: RECORD * 20]
        assert fetcher.counts.direct == fetcher.counts.dropped == fetcher.held_bytes == 0
    assert 0 < most <= 2000


def test_hints_that_nobody_takes_give_way_to_one_that_is_read() -> None:
    store = Store()
    with fetching(store, budget_bytes=1000, threads=2) as fetcher:
        for first in range(0, 400, 25):  # four fill the budget, and none of them is taken
            fetcher.hint(0, first * 2, 25)
        settled(fetcher, 4, store)
        assert len(store.loads) == 4
        assert bytes_of(fetcher, 750, 25) == CONTENT[7500:7750]
        assert fetcher.counts.dropped >= 1 and fetcher.counts.direct == 0
        fetcher.forget()
        store.loads.clear()
        fetcher.hint(1, 0, 100)  # all of the budget: nothing is held any more
        settled(fetcher, 1, store)
        assert bytes_of(fetcher, 0, 100, shard=1) == CONTENT[:1000]
        assert store.loads[-1] == (1, 0, 1000)


def test_what_is_forgotten_on_its_way_gives_its_place_back_once_it_has_come() -> None:
    store = Store()
    store.gate.clear()
    with fetching(store, budget_bytes=1000, threads=1) as fetcher:
        fetcher.hint(0, 0, 100)
        settled(fetcher, 1, store)
        fetcher.forget()
        assert fetcher.held_bytes == 1000  # a thread reads it still
        fetcher.hint(0, 200, 100)
        store.gate.set()
        assert bytes_of(fetcher, 200, 100) == CONTENT[2000:3000]
        assert fetcher.held_bytes == fetcher.counts.direct == 0 and fetcher.counts.dropped == 1


def test_a_range_larger_than_the_budget_comes_alone() -> None:
    store = Store()
    with fetching(store, budget_bytes=100) as fetcher:
        fetcher.hint(0, 0, 50)
        fetcher.hint(0, 50, 5)
        assert bytes_of(fetcher, 0, 50) == CONTENT[:500]
        assert bytes_of(fetcher, 50, 5) == CONTENT[500:550]
        assert fetcher.counts.ahead == 2


def test_a_failure_is_told_by_the_read_of_its_bytes_alone() -> None:
    """A damaged neighbour in one range with sound blocks: those are read, and it is named."""
    store = Store()

    def short(shard: int, start: int, stop: int) -> Exception | None:
        return CorruptionError("short", file="f", offset=200, got="", allowed="") if start < 200 < stop else None

    store.fails = short
    store.gate.clear()
    with fetching(store, budget_bytes=4000, threads=1) as fetcher:
        fetcher.hint(1, 0, 1)
        settled(fetcher, 1, store)
        for first in (0, 10, 20, 30):
            fetcher.hint(0, first, 10)
        fetcher.hint(0, 15, 10)
        store.gate.set()
        for first in (0, 10, 20, 30):
            assert bytes_of(fetcher, first, 10) == CONTENT[RECORD * first :][:100]
        with pytest.raises(CorruptionError, match="short"):
            bytes_of(fetcher, 15, 10)
        store.fails = lambda shard, start, stop: StorageError("gone")
        fetcher.hint(0, 100, 10)
        with pytest.raises(StorageError, match="gone"):  # all attempts were made: not again
            bytes_of(fetcher, 100, 10)
        assert store.loads.count((0, 1000, 1100)) == 1


def test_bytes_that_do_not_come_are_waited_for_until_the_deadline() -> None:
    store = Store()
    store.gate.clear()
    with fetching(store, budget_bytes=4000, threads=1, deadline_s=0.2) as fetcher:
        for first in (0, 50):
            fetcher.hint(0, first, 10)
        for first in (50, 0):  # one that waits in the queue, one that is on its way
            with pytest.raises(StorageTimeoutError, match=r"shard 0 were not read within 0\.2 s") as caught:
                fetcher.take(0, first, 10)
            assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_threads_end_with_their_owner() -> None:
    store = Store()
    fetcher = BlockFetcher([Shard()], store.load, name_of=str)

    class Owner:
        pass

    owner = Owner()
    weakref.finalize(owner, fetcher.stop)
    fetcher.hint(0, 0, 5)
    fetcher.take(0, 0, 5)
    workers = fetcher._workers
    del owner
    gc.collect()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers)
    fetcher.hint(0, 0, 5)  # after the end a hint is nothing, and a read still a read
    assert bytes_of(fetcher, 0, 5) == CONTENT[:50]


class InParts(Shard):
    """Records of ten bytes, each two parts of the file."""

    stretches = Stretches(np.arange(0, 20_000, 10).reshape(-1, 1) + np.array([[0, 5]]), 0)


def test_records_that_need_several_reads_are_not_joined_to_one_range() -> None:
    for shard, ranges in (
        (Shard(), [(0, 0, 80)]),
        (InParts(), [(0, first * 10, first * 10 + 10) for first in range(8)]),
    ):
        store = Store()
        fetcher = BlockFetcher([shard], store.load, name_of=str)
        with fetcher._lock:
            fetcher._start = lambda: None  # type: ignore[method-assign]
        for first in range(8):
            fetcher.hint(0, first, 1)
        fetcher._find_extents(next(iter(fetcher._hints._queue.values())))
        while (job := fetcher._hints.next_range(fetcher._ranges, fetcher.range_bytes)) is not None:
            fetcher._read(job)
        assert store.loads == ranges
        assert [bytes(fetcher.take(0, first, 1)[0]) for first in range(8)] == [
            CONTENT[first * 10 : first * 10 + 10] for first in range(8)
        ]
