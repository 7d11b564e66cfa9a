"""What SIGTERM and SIGHUP do to a job that trains nothing: its process ends in good order, with the code of the signal.

A driver of a run, whose ranks first write a checkpoint, has lockstep.training.driver.stop.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.05
ONE_SIGNAL_S = 1.0
"""`timeout` sends a signal to its child and then to the group, and Java passes it on: within this time they are one."""


class _Taken:
    """The last signal that the main thread has taken in a block of `signals_counted`."""

    blocks = 0
    at = -math.inf


@contextmanager
def signals_counted() -> Iterator[None]:
    """A block, maybe within others, in which the main thread takes signals and asks `is_new` about each."""
    _Taken.blocks += 1
    try:
        yield
    finally:
        _Taken.blocks -= 1
        if not _Taken.blocks:
            _Taken.at = -math.inf


def is_new() -> bool:
    """Whether a signal that arrives now is another one than the last: later than ONE_SIGNAL_S after it."""
    now = time.monotonic()
    new = now - _Taken.at > ONE_SIGNAL_S
    if new:
        _Taken.at = now
    return new


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP (a closed terminal) raise SystemExit with the code that a shell reports.

    What arrives within ONE_SIGNAL_S of the first does not disturb the end. A signal that is ignored already (nohup)
    stays ignored. Python handles signals only in the main thread; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        if is_new():
            raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number in ENDING if previous[number] not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, leave)
    try:
        with signals_counted(), _no_end_ignored():
            yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])


@contextmanager
def _no_end_ignored() -> Iterator[None]:
    """Raise the end that a signal asked for again, if it came to a callback of a weak reference or a `__del__`.

    Python ignores what these raise, and py4j talks to Java in them: the process would continue.
    """
    before, timers, ends = sys.unraisablehook, list[threading.Timer](), list[BaseException]()

    def ignored(what: sys.UnraisableHookArgs) -> None:
        end = what.exc_value
        main = threading.main_thread()
        if not isinstance(end, SystemExit | KeyboardInterrupt) or threading.current_thread() is not main:
            before(what)
            return

        ends.append(end)

        def again(number: int, frame: FrameType | None) -> None:
            timer.cancel()
            ends.clear()
            signal.signal(signal.SIGTERM, handler)
            raise end

        handler = signal.signal(signal.SIGTERM, again)
        timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main.ident, signal.SIGTERM))
        timers.append(timer)
        timer.start()

    sys.unraisablehook = ignored
    try:
        yield
        if ends:  # the block has ended sooner than the timer
            raise ends[0]
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()
