"""Calls that were given up and are still under way: how many of them one server may have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lockstep.storage.errors import StorageTimeoutError
from lockstep.storage.files.deadlines import call_with_deadline

T = TypeVar("T")

FREE = 32  # calls that may be given up before others are held back; measured: 3 threads and 4 descriptors each
LATER_S = 1.0  # for each one more the next call is begun so much later


class Unanswered:
    """Calls with deadlines to one server that may be frozen for hours, or have vanished without a word.

    Each call that is given up keeps a thread and a client until the server answers, which retries must not pile up
    without end: a driver would run out of descriptors. So from `FREE` of them on a new call is begun only some seconds
    after the one before, the longer the more there are; a day without an answer leaves some 400. Once a call succeeds
    the ones before it count no more, though some of them may never end: a write whose pipeline broke in silence.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = self._since = 0  # calls given up: all that are under way, and those since the last success
        self._age = 0  # how often a success has made the calls before it count no more
        self._begun_at = float("-inf")

    @property
    def left(self) -> int:
        """Calls that were given up and are still under way."""
        return self._left

    def call(self, fn: Callable[[], T], seconds: float, *, what: str, whom: str) -> T:
        """See `call_with_deadline`; the time for which a call is held back counts."""
        end = time.monotonic() + seconds
        self._admit(end, seconds, what, whom)
        ended = given_up = False
        age = 0

        def run() -> T:
            nonlocal ended
            try:
                return fn()
            finally:
                with self._changed:
                    ended = True
                    if given_up:
                        self._left -= 1
                        self._since -= age == self._age
                        self._changed.notify_all()

        try:
            result = call_with_deadline(run, max(0.0, end - time.monotonic()), what=what, whom=whom)
        except BaseException:
            with self._changed:
                given_up, age = not ended, self._age
                self._left += given_up
                self._since += given_up
            raise
        if self._since:
            with self._changed:
                self._since, self._age = 0, self._age + 1
                self._changed.notify_all()
        return result

    def _admit(self, end: float, seconds: float, what: str, whom: str) -> None:
        with self._changed:
            while (wait_s := self._wait_s()) > 0:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise StorageTimeoutError(
                        f"{what}: no answer from {whom} within {seconds:.3g} s",
                        got=f"no answer to {self._since} calls before it, so it was not asked again",
                        allowed="an answer",
                        next_step=f"Check that {whom} is alive and not overloaded.",
                    )
                self._changed.wait(min(wait_s, left_s))
            self._begun_at = time.monotonic()

    def _wait_s(self) -> float:
        more = self._since - FREE + 1
        return 0.0 if more <= 0 else self._begun_at + more * LATER_S - time.monotonic()
