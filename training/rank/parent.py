"""A rank whose parent is stopped by a signal ends by itself: nobody is left who would end it.

A supervisor ends its rank when the driver falls silent. Ranks of the local launcher are supervised by threads of the
driver, and a Spark worker may be stopped too: then only the rank itself can look.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

LOOK_EVERY_S = 1.0


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False  # it has ended
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def end_with_stopped_parent(parent: int, limit_s: float) -> None:
    """End this process at once when `parent` has been stopped for `limit_s` seconds; never returns."""
    stopped_s = 0.0  # by our own looks: a rank that was stopped too begins to count when it wakes
    while stopped_s < limit_s:
        time.sleep(min(LOOK_EVERY_S, limit_s))
        stopped_s = stopped_s + min(LOOK_EVERY_S, limit_s) if is_stopped(parent) else 0.0
    if select.select([], [sys.stderr], [], 0.0)[1]:  # a pipe that nobody empties may be full
        print(f"[rank: its parent process {parent} has been stopped for {limit_s:.0f} s]", file=sys.stderr, flush=True)
    os._exit(1)
