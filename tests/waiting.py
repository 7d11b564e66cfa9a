"""Waiting for a condition with a deadline."""

import time
from collections.abc import Callable

WAIT_S = 240.0


def until(condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
    """Return when the condition holds; fail after `wait_s` seconds."""
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, f"not within {wait_s:.0f} s"
        time.sleep(0.05)
