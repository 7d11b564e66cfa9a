"""What a run without a result is doing: training, stopped in good order, or interrupted."""

from __future__ import annotations

from typing import Any

from lockstep.storage.documents import unseal_as
from lockstep.storage.files.interface import FileSystem
from training.driver.ownership import driver_lives, read_lease
from training.run.paths import RunPaths

TRAINING, STOPPED, INTERRUPTED = "training", "stopped", "interrupted"
ELSEWHERE = "training or interrupted"
"""Its driver is on another host: only a later look at its lease shows whether it lives."""
WORDS = {
    TRAINING: "its driver lives",
    STOPPED: "in good order; jobs.train with the same flags resumes it",
    INTERRUPTED: "jobs.train with the same flags resumes it",
    ELSEWHERE: "its driver is on another host; if it has died, jobs.train with the same flags resumes it",
}


def state_of(fs: FileSystem, paths: RunPaths) -> str:
    """The state of a run that has no result of its newest generation."""
    lives = driver_lives(read_lease(fs, paths.lease))
    return ELSEWHERE if lives is None else TRAINING if lives else state_without_driver(fs, paths)


def state_without_driver(fs: FileSystem, paths: RunPaths) -> str:
    """The same where no driver lives."""
    return STOPPED if fs.exists(paths.stopped) else INTERRUPTED


def read_stopped(fs: FileSystem, paths: RunPaths) -> dict[str, Any] | None:
    """The document of training.driver.stop.write_stopped; None if there is none. Raises CorruptionError."""
    return unseal_as("stopped", fs.read_bytes(paths.stopped), paths.stopped) if fs.exists(paths.stopped) else None
