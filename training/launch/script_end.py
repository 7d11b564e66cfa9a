"""The end of a user's script as Python itself makes it, and what the rank tells of it.

A rank's process ends by `os._exit`, so what Python does at its end is done here: a trace by `sys.excepthook`, waiting
for threads, exit hooks.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from lockstep.storage.errors import LockstepError, TrainingFailedError
from training.control import current


class ScriptFailedError(TrainingFailedError):
    """A script ended itself with an exit code that is not 0; it has said why, a stack trace would say no more."""

    quiet = True


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known before the script runs."""

    process: int
    output: tuple[int, int]
    """Device and inode of the pipe to the supervisor, on file descriptors 1 and 2."""

    @classmethod
    def now(cls) -> Begun:
        """Of this process."""
        return cls(os.getpid(), _file_of(2))


def end_script(
    begun: Begun, error: BaseException | None, path: str, name: str, tell: Callable[[BaseException], None]
) -> None:
    """Do what Python does at the end of the script `name`, which ran from `path` and raised `error`.

    A failure is told to the driver by `tell` before threads and exit hooks are waited for: other ranks wait for this
    one, and some hooks never end. The supervisor's grace (Limits.grace_s) is theirs then.
    Raises what the rank failed of: the error itself, the one of another library behind it, or ScriptFailedError for
    an exit code that is not 0. Does not return in a process that the script has forked: it is no rank.
    """
    _open_streams(begun)
    code = _exit_code(error)
    if code and error is not None:
        _print(error, path)
    if os.getpid() != begun.process:
        _end_fork(code)
    failure = _failure(error, code, name) if error is not None and code else None
    if failure is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the driver ends all ranks, this one after the grace
        tell(failure)
    _last_calls()
    _open_streams(begun)
    if failure is not None:
        raise failure


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _print(error: BaseException, path: str) -> None:
    """What Python prints: the text of `sys.exit("why")`, else a trace, from the script's own first frame on."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    error.__traceback__ = _of_script(error.__traceback__, path)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # the script's own hook: its error and the one that it was to show are both told
        traceback.print_exc()
        traceback.print_exception(error)


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename != path:
        found = found.tb_next
    return found or trace


def _failure(error: BaseException, code: int, name: str) -> BaseException:
    """What the driver is told; the trace has been printed."""
    if isinstance(error, SystemExit):
        return ScriptFailedError(f"{name} ended by sys.exit with exit code {code}, where 0 is success")
    if not isinstance(error, Exception):
        return ScriptFailedError(f"{name} ended by {error!r}")
    cause = current.fault()
    if isinstance(cause, LockstepError) and cause is not error:
        print(f"{type(cause).__name__}: {cause}", file=sys.stderr)
        error = cause
    vars(error)["quiet"] = True  # what training.rank.__main__ asks before it prints a trace
    return error


def _last_calls() -> None:
    # Both are what Python calls at its own end; there are no public names for them.
    threading._shutdown()  # type: ignore[attr-defined]  # private, see above
    atexit._run_exitfuncs()


def _end_fork(code: int) -> NoReturn:
    _last_calls()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _open_streams(begun: Begun) -> None:
    """Open again what the script has closed or taken away: the rank's end is told there.

    On the pipe to the supervisor, where a file descriptor of it is left, else nowhere.
    """
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError, ValueError):
            left = next((number for number in (2, 1) if _file_of(number) == begun.output), None)
            where = os.devnull if left is None else left
            stream = open(where, "w", buffering=1, encoding="utf-8", errors="replace", closefd=left is None)  # noqa: SIM115 - open to the end
            setattr(sys, name, stream)


def _file_of(number: int) -> tuple[int, int]:
    try:
        found = os.fstat(number)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino
