"""Signals that end a driver, taken as Ctrl-C is: what it has begun is ended in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP (the terminal was closed) raise SystemExit with the code that a shell reports.

    A signal that the caller's caller ignores (nohup) stays ignored. Python takes signals in the main thread alone;
    in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number in ENDING if previous[number] not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])
