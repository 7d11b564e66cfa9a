"""What a run without a result is doing: training, stopped in good order, failed, or interrupted."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import CorruptionError, DataError, NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.training.driver.ownership import driver_lives, read_lease
from lockstep.training.run.lineage import chain_of
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import FAILED, INTERRUPTED, STOPPED, TRAINING, RunStatus, read_status

ELSEWHERE = "training or interrupted"
"""The state of a run whose driver is on another host: only a later look at its lease shows whether it lives."""
WORDS = {
    TRAINING: "its driver lives",
    STOPPED: "in good order; lockstep train with the same flags resumes it",
    FAILED: "its driver gave up; lockstep status has the error, and lockstep train with the same flags tries again",
    INTERRUPTED: "lockstep train with the same flags resumes it",
    ELSEWHERE: "its driver is on another host; if it has died, lockstep train with the same flags resumes it",
}


def state_of(fs: FileSystem, paths: RunPaths) -> str:
    """The state of a run that has no result of its newest generation."""
    lives = driver_lives(read_lease(fs, paths.lease))
    return ELSEWHERE if lives is None else TRAINING if lives else state_without_driver(fs, paths)


def state_without_driver(fs: FileSystem, paths: RunPaths) -> str:
    """Return the state of a run without a living driver: stopped, failed or interrupted."""
    if fs.exists(paths.stopped):
        return STOPPED
    try:
        return FAILED if read_status(fs, paths).state == FAILED else INTERRUPTED
    except (NotFoundError, CorruptionError):  # killed in its first seconds
        return INTERRUPTED


def state_now(status: RunStatus, fs: FileSystem, paths: RunPaths, now: datetime.datetime) -> str:
    """The state in a run's status.json, or `interrupted` if its driver is gone without writing another one.

    The driver of another host is taken for gone when it has been silent for SILENT_S.
    """
    if status.ended:
        return status.state
    lease = read_lease(fs, paths.lease)
    lives = None if lease is None else driver_lives(lease)
    gone = status.silent_s(now) is not None if lives is None else not lives
    return state_without_driver(fs, paths) if gone else status.state


def status_now(fs: FileSystem, paths: RunPaths, now: datetime.datetime) -> RunStatus:
    """The run's status.json with the state of `state_now`. If no driver writes it any more, its newest checkpoint is
    the one that is there: a driver may have committed more than it could write down.

    Raises what `read_status` does.
    """
    written = read_status(fs, paths)
    status = replace(written, state=state_now(written, fs, paths, now))
    if status.state != INTERRUPTED:
        return status
    try:
        chain, _ = chain_of(fs, paths)
    except DataError:  # lockstep train and lockstep verify say what is wrong with them
        return status
    return replace(status, checkpoint=str(chain[0]) if chain else None)


def read_stopped(fs: FileSystem, paths: RunPaths) -> dict[str, Any] | None:
    """The document of lockstep.training.driver.stop.write_stopped; None if there is none. Raises CorruptionError."""
    return unseal_as("stopped", fs.read_bytes(paths.stopped), paths.stopped) if fs.exists(paths.stopped) else None
