"""Calls with deadlines: code that may block forever runs on a thread, which is abandoned at the deadline."""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from lockstep.storage.errors import (
    ExistsError,
    NotFoundError,
    RetryableStorageError,
    StorageAwayError,
    StorageError,
    StorageTimeoutError,
)
from lockstep.storage.settings import give_up_s as default_give_up_s

T = TypeVar("T")
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
NAMED_EVERY_S = 300.0  # a driver asks for several things, each minute
FREE = 32  # abandoned calls before new ones are delayed; measured: 3 threads and 4 descriptors each
LATER_S = 1.0  # delay of a new call for each abandoned call beyond that


def call_with_deadline(fn: Callable[[], T], seconds: float, *, what: str, whom: str) -> T:
    """Return what `fn()` returns, or raise what it raises; StorageTimeoutError after `seconds`.

    `fn` must release the GIL while it waits. At the deadline its thread is abandoned: a daemon, so it holds up no
    exit, but whatever `fn` asked for may still happen later. Do not use objects again that it may still hold.
    """
    job = _Job(fn)
    worker = _take()
    worker.jobs.put(job)
    try:
        finished = job.done.wait(seconds)
    except BaseException:
        job.abandon()
        raise
    if not finished and job.abandon():
        raise StorageTimeoutError(
            f"{what}: no answer from {whom} within {seconds:.3g} s",
            got="nothing",
            allowed="an answer",
            next_step=f"Check that {whom} is alive and not overloaded.",
        )
    if job.error is not None:
        raise job.error
    result: T = job.result
    return result


def left_behind() -> int:
    """How many abandoned calls are still running."""
    return len(_abandoned)


def end_process(code: int) -> NoReturn:
    """End the process with `code`, as sys.exit does, also with abandoned calls.

    A thread that returns from native code during the interpreter's shutdown is unwound by force, which Rust does not
    survive: the process aborts with exit code 134 instead of `code`. So if there are abandoned calls, run the exit
    functions, flush the streams and skip the rest of the shutdown.
    """
    if left_behind():
        atexit._run_exitfuncs()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe cannot be flushed, and cannot report it
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _Job:
    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._lock = threading.Lock()
        self._abandoned = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> bool:
        """Run the function; returns whether the caller still waits for it."""
        result, error = None, None
        try:
            assert self._fn is not None
            result = self._fn()
        except BaseException as caught:  # the caller raises it; a Rust panic is no Exception
            error = caught
        self._fn = None
        with self._lock:
            if not self._abandoned:
                self.result, self.error = result, error
                self.done.set()
            _abandoned.discard(self)
            return not self._abandoned

    def abandon(self) -> bool:
        """Stop waiting; returns False where the result has come in the meantime."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            if self._abandoned:
                _abandoned.add(self)
            return self._abandoned


class _Worker:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        threading.Thread(target=self._loop, name="storage-call", daemon=True).start()

    def _loop(self) -> None:
        # An abandoned thread ends with its call; the others wait for the next call, which saves starting a thread.
        while self.jobs.get().run():
            _idle.append(self)


_idle: list[_Worker] = []
_abandoned: set[_Job] = set()


def _take() -> _Worker:
    try:
        return _idle.pop()  # list.pop and append are atomic
    except IndexError:
        return _Worker()


def _forget_after_fork() -> None:
    _idle.clear()  # threads do not survive a fork
    _abandoned.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


log = logging.getLogger(__name__)
_named_at: dict[str, float] = {}
"""When a warning named who does not serve."""
_served_at: dict[str, float] = {}
"""When the last call was answered."""
_failing_since: dict[str, float] = {}
"""The begin of the first call that failed since then."""
_given_up: set[str] = set()


def given_up(whom: str) -> bool:
    """Whether a call to `whom` has used up all of its attempts, and none was answered since it began."""
    return whom in _given_up


def _serves(whom: str) -> None:
    _served_at[whom] = time.monotonic()
    _failing_since.pop(whom, None)
    _given_up.discard(whom)


class Backoff:
    """Counts attempts of one operation against a total of `give_up_s` seconds (default: the setting)."""

    def __init__(self, give_up_s: float | None = None) -> None:
        self._limit = default_give_up_s() if give_up_s is None else give_up_s
        self._start = time.monotonic()
        self._wait = FIRST_WAIT_S
        self.attempts = 0
        self._cause: StorageError | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the total is used up; not below 0."""
        return max(0.0, self._start + self._limit - time.monotonic())

    def wait_or_raise(self, error: StorageError, *, what: str, whom: str) -> None:
        """Sleep before the next attempt, or raise StorageAwayError where no time is left for one."""
        self.attempts += 1
        served_at = _served_at.get(whom, -math.inf)
        since = _failing_since.setdefault(whom, max(self._start, served_at))
        # The total often cuts the last attempt short; the error of the one before is more useful.
        if self._cause is None or not isinstance(error, StorageTimeoutError):
            self._cause = error
        if self.left_s <= self._wait:
            away = StorageAwayError(
                f"{whom} did not serve {what} within {time.monotonic() - self._start:.3g} s ({self.attempts} attempts)",
                got=self._cause.what + (f" ({self._cause.got})" if self._cause.got else ""),
                allowed=f"success within {self._limit:.3g} s",
                next_step=error.next_step or f"Check {whom}, then run again.",
            )
            away.whom = whom
            if served_at <= self._start:  # else others were served meanwhile
                _given_up.add(whom)
                away.away_s = time.monotonic() - min(self._start, since)
            raise away from self._cause
        if self.attempts == 1:
            now = time.monotonic()
            level = logging.DEBUG
            if now >= _named_at.get(whom, -math.inf) + NAMED_EVERY_S:
                level, _named_at[whom] = logging.WARNING, now
            why = f"{error.what} ({error.got})" if error.got else error.what
            log.log(level, "%s does not serve %s: %s; trying again for %.0f s", whom, what, why, self._limit)
        # Many tasks see the same failure at the same moment; without jitter they would all retry at the same moment.
        time.sleep(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(2 * self._wait, LONGEST_WAIT_S)


def with_retries(call: Callable[[float], T], *, what: str, whom: str, give_up_s: float | None = None) -> T:
    """Call `call(seconds_left)` until it succeeds, fails for good, or the total time is over (StorageAwayError)."""
    backoff = Backoff(give_up_s)
    while True:
        try:
            result = call(backoff.left_s)
        except (RetryableStorageError, StorageTimeoutError) as error:
            backoff.wait_or_raise(error, what=what, whom=whom)
        except (NotFoundError, ExistsError):  # an answer too
            _serves(whom)
            raise
        else:
            _serves(whom)
            return result


class Unanswered:
    """Calls with deadlines to one server that may be frozen for hours, or may have disappeared.

    Each abandoned call keeps a thread and a client until the server answers. Retries must not let them pile up, or a
    driver would run out of descriptors. So from `FREE` abandoned calls on, each new call waits some seconds after the
    one before, longer the more there are; a day without an answer leaves some 400. Once a call succeeds, earlier ones
    no longer count, though some may never end, such as a write whose pipeline broke silently.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = self._since = 0  # abandoned calls: all still running, and those since the last success
        self._age = 0  # how many successes have reset the count
        self._begun_at = float("-inf")

    @property
    def left(self) -> int:
        """Abandoned calls that are still running."""
        return self._left

    def call(self, fn: Callable[[], T], seconds: float, *, what: str, whom: str) -> T:
        """Make a call as `call_with_deadline` does; a delay before the call counts."""
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
