"""Ends threads that read in native code before the interpreter exits.

A thread that returns from native code while the interpreter shuts down aborts the process, daemon or not.
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

JOIN_S = 5.0  # at the exit, for the threads of all owners together; a longer read has its own deadline
T = TypeVar("T")
_POLL_S = 0.2
_JOIN_S = 10.0


class OwnsThreads(Protocol):
    """An object that owns threads."""

    def stop(self) -> None:
        """Ask its threads to end; returns at once."""

    def close(self, limit_s: float) -> None:
        """Call `stop`, and wait up to `limit_s` seconds for the threads."""


def end_at_exit(owner: OwnsThreads) -> None:
    """Close `owner` at the exit of the process, if it still exists then."""
    _owners.add(owner)


def end_in_thread(end: Callable[[], None]) -> None:
    """Run `end` in another thread, for a finalizer whose `end` takes a lock: the garbage collector may run it in a
    thread that holds this lock, which would deadlock.
    """
    thread = threading.Thread(target=end, name="end-in-thread", daemon=True)
    _endings.append(thread)
    thread.start()


_owners: weakref.WeakSet[OwnsThreads] = weakref.WeakSet()
_endings: deque[threading.Thread] = deque(maxlen=64)  # the last ones: only these may still run


def _close_all() -> None:
    end = time.monotonic() + JOIN_S
    for owner in list(_owners):  # ask all before waiting for any
        owner.stop()
    for owner in list(_owners):
        owner.close(max(0.0, end - time.monotonic()))
    for thread in list(_endings):
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_close_all)


class ReadAhead(Generic[T]):
    """Iterates over `items` in a thread, one finished item ahead of the consumer.

    After `deadline_s` without an item `__next__` raises a StorageTimeoutError; `waiting_for()` names for its message
    what the thread is doing. `__next__` raises an exception of `items` unchanged.
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
                next_step="Look at the file system's health (`lockstep doctor`), then start the run again.",
            ) from None
        if isinstance(answer, tuple):
            return answer[0]
        self.close()
        raise StopIteration if answer is None else answer

    def close(self) -> None:
        """End the thread. A read in progress ends by its own deadline; the thread never outlives the process."""
        self._done = True
        self._stop.set()
        if self._thread is not threading.current_thread():  # the garbage collector may call this there
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
        # Everything, also the KeyboardInterrupt of an importing thread: the consumer raises it again.
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
