"""Threads that read in native code are ended before the interpreter is.

One that comes back from native code while the interpreter is torn down ends the process by an abort, daemon or not.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

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
