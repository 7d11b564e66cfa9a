"""Work beside the training on what processor time its steps leave: in a thread that steps back behind all others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

# A tenth of a core that others want all the time, all of it in the moments when they do not: a step has such moments
# (between its batches, while it waits for another rank). 19 would be a seventieth: a checkpoint's half second of
# processor time must not take half a minute on a host that is always busy, since what it holds is lost until it ends.
NICE = 10
_LOWEST = 19


def at_low_priority(work: Callable[[], T]) -> T:
    """What `work()` returns, or raises what it raises; the caller waits, at its own priority.

    For work that seldom holds the interpreter's lock: who holds it and is not scheduled holds up the others. It must
    start no thread that lives on: threads inherit the priority, and none may raise it again. Only Linux has priorities
    of single threads; elsewhere the work is done at the priority of the process.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _step_back()
            result.append(work())
        except BaseException as error:  # raised below, where the caller waits
            errors.append(error)

    thread = threading.Thread(target=run, name=f"{threading.current_thread().name}, low priority", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def _step_back() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()  # one thread: PRIO_PROCESS means that on Linux, and the process elsewhere
        with suppress(OSError):  # a sandbox may refuse even this; the work is the same at any priority
            os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, thread) + NICE))
