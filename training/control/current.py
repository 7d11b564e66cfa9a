"""The launch that this process is a rank of, for libraries that a user's script imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    from training.comm.base import Communicator
    from training.control.context import RankContext

NUM_RANKS = "LOCKSTEP_NUM_RANKS"

_context: RankContext | None = None
_alone: Communicator | None = None
_faults: list[Callable[[], BaseException | None]] = []


def set_context(context: RankContext) -> None:
    """Say that this process is a rank; called before its script runs."""
    global _context
    _context = context


def context() -> RankContext | None:
    """The rank that this process is; None for a script that was started by itself.

    Raises ConfigError in a process that a rank has started: it has the rank's environment, but is no rank.
    """
    if _context is None and NUM_RANKS in os.environ:
        raise ConfigError(
            "this process is no rank, but was started by one",
            got=f"{NUM_RANKS}={os.environ[NUM_RANKS]} and no connection to the driver",
            allowed="calls to other ranks from the process that jobs.launch started",
            next_step=f"Make these calls in the script itself, or unset {NUM_RANKS} for a child that stands alone.",
        )
    return _context


def communicator() -> Communicator:
    """The communicator of all ranks, the same at every call; a script that was started by itself is one rank alone.

    A collective at the first call. Raises what `context` does, and CommunicationError for a rank that does not join.
    """
    global _alone
    launched = context()
    if launched is not None:
        return launched.communicator()
    if _alone is None:
        from training.comm.solo import SoloCommunicator

        _alone = SoloCommunicator()
    return _alone


def report_faults_of(look: Callable[[], BaseException | None]) -> None:
    """Have `look()` asked when the script fails: TensorFlow repeats only the text of an error raised in its graph."""
    _faults.append(look)


def fault() -> BaseException | None:
    """The error of another library that is behind the script's failure, as it was raised."""
    return next((found for look in _faults if (found := look()) is not None), None)
