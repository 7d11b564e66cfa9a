"""Threads that read in native code are ended before the interpreter is.

One that comes back from native code while the interpreter is torn down ends the process by an abort, daemon or not.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from lockstep.storage.errors import StorageTimeoutError

JOIN_S = 5.0  # at the exit, for the threads of all owners together: a longer read has a deadline of its own


class OwnsThreads(Protocol):
    """What has threads to end."""

    def stop(self) -> None:
        """Tell them to end; returns at once."""

    def close(self, limit_s: float) -> None:
        """`stop`, and wait for them for up to so many seconds."""


def end_at_exit(owner: OwnsThreads) -> None:
    """Close `owner` at the process's exit, if it is still there then."""
    _owners.add(owner)


def end_beside(end: Callable[[], None]) -> None:
    """Run `end` in a thread of its own, for a finalizer whose `end` takes a lock: the collector may have come to it in
    a thread that holds this lock, and would stand still.
    """
    thread = threading.Thread(target=end, name="end-beside", daemon=True)
    _endings.append(thread)
    thread.start()


_owners: weakref.WeakSet[OwnsThreads] = weakref.WeakSet()
_endings: deque[threading.Thread] = deque(maxlen=64)  # the last ones, which alone may still be at it


def _close_all() -> None:
    end = time.monotonic() + JOIN_S
    for owner in list(_owners):  # all are told before one is waited for
        owner.stop()
    for owner in list(_owners):
        owner.close(max(0.0, end - time.monotonic()))
    for thread in list(_endings):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_close_all)


T = TypeVar("T")
_POLL_S = 0.2
_JOIN_S = 10.0


class ReadAhead(Generic[T]):
    """Iterates over `items` in a thread of its own, one finished item ahead of the consumer.

    `waiting_for()` says in words what the thread is at, for the message of the StorageTimeoutError that `__next__`
    raises after `deadline_s` without an item. An exception of `items` is raised, as it is, by `__next__`.
    """

    def __init__(self, items: Iterator[T], waiting_for: Callable[[], str], deadline_s: float) -> None:
        self._items, self._waiting_for, self._deadline_s = items, waiting_for, deadline_s
        # (item,) for an item, an exception for the failure, None for the end.
        self._queue: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        try:
            answer = self._queue.get(timeout=self._deadline_s)
        except queue.Empty:
            self.close()
            raise StorageTimeoutError(
                f"no samples came for {self._deadline_s:g} s",
                got=f"still waiting for {self._waiting_for()}",
                allowed=f"the next batch within {self._deadline_s:g} s",
                next_step="Look at the file system's health (`python -m jobs.doctor`), then start the run again.",
            ) from None
        if isinstance(answer, tuple):
            return answer[0]
        self.close()
        raise StopIteration if answer is None else answer

    def close(self) -> None:
        """End the thread; a read that is under way ends by its own deadline, the thread never outlives the process."""
        self._done = True
        self._stop.set()
        if self._thread is not threading.current_thread():  # the collector may close a forgotten iterator there
            self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put((item,)):
                    return
            self._put(None)
        # Everything, KeyboardInterrupt of an importing thread too: it is raised again in the consumer, nowhere lost.
        except BaseException as error:
            self._put(error)

    def _put(self, answer: tuple[T] | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(answer, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
