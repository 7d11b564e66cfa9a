"""What SIGTERM or Ctrl-C does to a run, in its driver: after the first the ranks write a checkpoint and end, a second
ends them at once. Jobs that train nothing end by lockstep.process.signals.
"""

from __future__ import annotations

import datetime
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lockstep.process.signals import is_new, signals_counted
from lockstep.storage.documents import seal
from lockstep.storage.errors import LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.publish import write_file
from lockstep.training.run.lineage import CheckpointRef
from lockstep.training.run.paths import RunPaths

EXIT_STOPPED = 75
"""The exit code of a driver that was stopped in order: the same call resumes the run (EX_TEMPFAIL of sysexits.h)."""
FORMAT_VERSION = 1


class EndedByCallerError(LockstepError):
    """`Hooks.ended` has ended a run before its end; the same configuration resumes it from its last checkpoint."""


class StoppedRun(KeyboardInterrupt):
    """Ctrl-C has stopped the run in good order; raised as a KeyboardInterrupt, which a notebook and a script expect."""

    exit_code = EXIT_STOPPED


class StopRequest:
    """Takes SIGTERM and Ctrl-C while `taken`. While ranks train (`waits`), the first one is only noted; before and
    after, it raises what `leave` does. A second one raises SystemExit or KeyboardInterrupt with the code of the signal.
    """

    def __init__(self, grace_s: float = math.inf) -> None:
        self.grace_s = grace_s
        self.by: str | None = None
        """Who asked for the stop: SIGTERM, SIGINT, or a rank that got one of them; None before."""
        self.last_line: str | None = None
        """What was saved, and how to resume; printed last."""
        self._waits = False

    @contextmanager
    def taken(self) -> Iterator[StopRequest]:
        """Take the signals. One that is ignored already stays so; outside the main thread this does nothing."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {}
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.getsignal(number) for number in numbers}
        taken = [number for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)]
        for number in taken:
            signal.signal(number, self._take)
        try:
            with signals_counted():
                yield self
        finally:
            for number in taken:
                signal.signal(number, previous[number])
            if self.last_line is not None:
                print(self.last_line, file=sys.stderr, flush=True)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """While this is open, ranks can write a checkpoint first."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def leave(self) -> NoReturn:
        """End this call: raises StoppedRun after Ctrl-C, else SystemExit, both with EXIT_STOPPED."""
        if self.by == signal.SIGINT.name:
            raise StoppedRun
        raise SystemExit(EXIT_STOPPED)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not is_new():
            return
        if self.by is None:
            self.by = signal.Signals(number).name
            if not self._waits:
                self.leave()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


def write_stopped(
    fs: FileSystem, paths: RunPaths, *, generation: int, by: str, tip: CheckpointRef | None, steps: int, saved: bool
) -> None:
    """Write RUN/stopped.json; the next claim removes it. `saved`: all ranks have left with a checkpoint of their last
    step."""
    document = {
        "format_version": FORMAT_VERSION,
        "kind": "stopped",
        "generation": generation,
        "by": by,
        "checkpoint": str(tip) if tip else None,
        "step": tip.step if tip else 0,
        "steps": steps,
        "saved": saved,
        "stopped_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_file(fs, paths.stopped, seal(document), exclusive=False)
