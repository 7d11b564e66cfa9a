"""Locks on files between processes (flock): the kernel lets go of one as its holder ends, however that ends."""

from __future__ import annotations

import fcntl
import os
import time

_POLL_S = 0.01  # flock itself waits without end, or not at all


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file unless another holder is in the way; whether it is locked. Closing the descriptor unlocks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, limit_s: float, *, shared: bool = False) -> bool:
    """`try_lock` again and again, for up to `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock, and keep the file open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: str) -> bool:
    """Whether anybody holds a lock on a file; for that moment nobody else can take one. A missing file has none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def remove_unlocked(path: str) -> bool:
    """Remove a file that nobody holds a lock on; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(descriptor):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    finally:
        os.close(descriptor)
    return True
