"""What a rank leaves behind: its process group, daemons that have left the group, temporary files.

A daemon begins a session of its own, so no group tells whose it is. Its environment does: a rank is started with a mark
that whatever it starts inherits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

MARK = "LOCKSTEP_PROCESS"
_PASSES = 5  # a process may start another one while they are looked for
_BETWEEN_S = 0.02


def new_mark() -> str:
    """A value of `MARK` that no other rank on this host has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def scratch_folder(mark: str) -> str:
    """Where the rank with this mark keeps its temporary files, if it keeps any; its supervisor removes the folder."""
    return os.path.join(tempfile.gettempdir(), f"lockstep-rank-{mark}")


def end_left(group: int, mark: str) -> None:
    """Kill what is left of a rank that has ended, its process group and all that bears its mark; remove its scratch."""
    _kill_left(group, mark)
    shutil.rmtree(scratch_folder(mark), ignore_errors=True)


def _kill_left(group: int, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it, as a rule
        os.killpg(group, signal.SIGKILL)
    end_marked(MARK, mark)


def end_marked(name: str, value: str) -> None:
    """Kill every process of this user in whose environment the variable `name` has this value."""
    for _ in range(_PASSES):
        if not (found := _marked(f"{name}={value}".encode())):
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
