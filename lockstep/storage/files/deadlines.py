"""Calls that end: code that may block without limit runs on a thread that is left behind when its time is over."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from lockstep.storage.errors import StorageTimeoutError

T = TypeVar("T")


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
    """How many abandoned calls are still under way."""
    return len(_abandoned)


def end_process(code: int) -> NoReturn:
    """End the process with `code`, as sys.exit does, also where calls were left behind.

    A thread that comes back from native code while the interpreter is torn down is unwound by force, which Rust does
    not bear: the process then aborts (exit 134 in place of `code`). So with such threads the interpreter's end is
    left out: exit functions run, streams are flushed, the process ends.
    """
    if left_behind():
        atexit._run_exitfuncs()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe cannot be flushed, and there is nobody to tell
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
        """Run the function; returns whether someone still waits for it."""
        result, error = None, None
        try:
            assert self._fn is not None
            result = self._fn()
        except BaseException as caught:  # handed to the caller, who raises it; a Rust panic is no Exception
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
        # A thread that was abandoned ends with its call; others wait for the next one, which saves their start.
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
