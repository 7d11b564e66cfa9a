"""Where a rank's threads are: their Python stacks, written by a signal's handler that needs no interpreter.

A rank that hangs in native code, or in a callback that never returns, answers too. Its supervisor sends the signal and
reads the file that both share.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2
WAIT_S, LOOK_S = 1.0, 0.05
MAX_BYTES = 256 << 10


def new_stacks() -> int:
    """A file descriptor of an empty file in memory."""
    return os.memfd_create("lockstep-stacks", os.MFD_CLOEXEC)


def answer_with_stacks(fd: int) -> None:
    """Let this process write the stacks of all its threads to `fd` at each SIGNAL from now on."""
    faulthandler.register(SIGNAL, file=fd, all_threads=True)


class Stacks:
    """A supervisor's side of the file `fd`, which this takes over."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def of(self, pid: int) -> str:
        """The stacks of the process, within WAIT_S; a sentence in their place if it does not answer."""
        if not _handles(pid):
            return "no stacks: the process has not begun, or has ended"
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)  # also of the rank, which shares the position
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        end, size = time.monotonic() + WAIT_S, 0
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            before, size = size, os.fstat(self._fd).st_size
            if size and size == before:
                return os.pread(self._fd, min(size, MAX_BYTES), 0).decode("utf-8", "replace")
        return f"no stacks within {WAIT_S:g} s: the process is stopped by a signal, or waits in the kernel"

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)


def _handles(pid: int) -> bool:
    """Whether the process has set a handler; without one the signal would end it."""
    try:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)
