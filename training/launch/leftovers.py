"""Processes that a rank leaves behind: its process group, and daemons that have left the group.

A daemon begins a session of its own, so no group tells whose it is. Its environment does: a rank is started with a mark
that whatever it starts inherits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

MARK = "LOCKSTEP_PROCESS"
_PASSES = 5  # a process may start another one while they are looked for
_BETWEEN_S = 0.02


def new_mark() -> str:
    """A value of `MARK` that no other rank on this host has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def end_left(group: int, mark: str) -> None:
    """Kill what is left of a rank that has ended: its process group, and all that bears its mark."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it, as a rule
        os.killpg(group, signal.SIGKILL)
    for _ in range(_PASSES):
        if not (found := _marked(f"{MARK}={mark}".encode())):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_S)


def _marked(wanted: bytes) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
    return found
