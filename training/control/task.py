"""The task of a rank, how ranks connect, their deadlines, and how their processes are marked."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from lockstep.storage.errors import require
from lockstep.training.comm.options import CommOptions
from lockstep.training.control.protocol import Message

MARK = "LOCKSTEP_PROCESS"
SCRATCH_LOCK = "lock"
"""A file in a rank's scratch folder, which the rank holds locked (flock) while it lives."""


@dataclass(frozen=True, kw_only=True)
class CommOrder(Message):
    """How ranks connect, in every order whose ranks do."""

    options: CommOptions = field(default_factory=CommOptions)
    freeze: bool = False
    """Whether rank 0 sends a plan that was made now to the driver, which freezes it in the run."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """One entry that all ranks of a launch call."""

    entry: str
    """`module:function`, called with a RankContext, returning a JSON-able dict."""
    payload: dict[str, Any] = field(default_factory=dict)
    """The order as a JSON object, the entry's `context.payload`; holds no secrets."""
    hadoop: dict[str, str] = field(default_factory=dict)
    """The driver's fs.* and dfs.* settings, set in each rank before the entry is called."""
    logs: str | None = None
    """URL of a directory for the ranks' logs; None keeps only the last lines in memory."""
    stream: bool = False
    """Whether each line that a rank prints is sent to the driver's `Handler.on_output`."""
    tls: bool = False
    """Whether connections between ranks on different hosts are encrypted; the launcher makes the certificates."""
    leaves: bool = False
    """Whether ranks can write a checkpoint and end on request: then a SIGTERM that is not their supervisor's asks all
    of them to."""

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        right, next_step = bool(module) and function.isidentifier(), "Name the function that each rank calls."
        require(right, "a rank's entry", repr(self.entry), "module:function", next_step)
        json.dumps(self.payload, allow_nan=False)  # a payload that is not JSON fails here, not in a remote rank

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RankTask:
        """The inverse of `to_json`."""
        return cls(**document)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Deadlines of a launch, in seconds."""

    start_s: float = 300.0
    """A rank that has not connected so long after the start is absent."""
    stall_s: float = 600.0
    """A rank whose step and phase do not change for so long is stalled."""
    beat_s: float = 1.0
    """Seconds between two heartbeats of a rank."""
    silent_s: float = 10.0
    """A rank without a heartbeat for so long is lost; while it imports or opens the dataset, `start_s` applies."""
    stopped_s: float = 5.0
    """A rank whose process is stopped by a signal (SIGSTOP) for so long has failed, in any phase."""
    grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""
    lost_s: float = 30.0
    """A supervisor that does not hear the driver for so long kills its rank."""


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False  # it has ended


def scratch_folder(mark: str) -> str:
    """The folder for temporary files of the rank with this mark, if it has any; its supervisor removes it."""
    return os.path.join(tempfile.gettempdir(), f"lockstep-rank-{mark}")
