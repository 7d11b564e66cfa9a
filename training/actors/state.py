"""What a run of `lockstep agent` is doing now, by its lease, its newest checkpoint and its model."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.storage.files.interface import FileSystem
from lockstep.training.actors.learner import Progress
from lockstep.training.driver.ownership import driver_lives, read_lease
from lockstep.training.driver.stop import EXIT_STOPPED
from lockstep.training.run.lineage import Checkpoint, find_tip
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import FINISHED, INTERRUPTED, SILENT_S, STOPPED

PLAYING = "playing"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStatus:
    """A run of lockstep agent. Its numbers are those of the newest checkpoint."""

    state: str
    """playing, finished, stopped (in good order), or interrupted: its driver is gone without another one."""
    checkpoint: str | None
    progress: Progress
    silent_for_s: float = field(default=0.0, compare=False)
    """How long no driver has rewritten the lease, by the clocks of this host and the storage."""

    @property
    def ended(self) -> bool:
        """Whether its driver has ended in order."""
        return self.state in (FINISHED, STOPPED)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command that ended in order; None while it has not."""
        return {FINISHED: 0, STOPPED: EXIT_STOPPED}.get(self.state)

    def silent_s(self, now: datetime.datetime) -> float | None:
        """Return how long no driver has written, if longer than a living one takes; else None, and None for a run that
        ended."""
        return None if self.ended or self.silent_for_s < SILENT_S else self.silent_for_s

    def words(self, run: str) -> str:
        """The status as lines of text, for a terminal."""
        lines = [f"{run}: {self.state}"]
        lines[0] += f", {self.progress.words()}" if self.checkpoint else ""
        lines.append(f"  newest checkpoint: {self.checkpoint or 'none yet'}")
        if self.state in (STOPPED, INTERRUPTED):
            lines.append(f"  the same lockstep agent {'resumes it' if self.checkpoint else 'begins again'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The state, the checkpoint, the mean return, and the counts of the progress."""
        counts = {name: value for name, value in asdict(self.progress).items() if name != "returns"}
        return {"state": self.state, "checkpoint": self.checkpoint, "mean_return": self.progress.mean_return, **counts}


def agent_now(fs: FileSystem, paths: RunPaths, now: datetime.datetime) -> AgentStatus:
    """The status of the run of lockstep agent at `paths`. Raises what lockstep.training.run.lineage.find_tip does."""
    tip = find_tip(fs, paths)
    silent_s = 0.0
    if fs.exists(paths.lease):
        silent_s = now.timestamp() - fs.stat(paths.lease).mtime_ms / 1000
    return AgentStatus(
        state=_state(fs, paths, tip, silent_s),
        checkpoint=None if tip is None else str(tip.ref),
        progress=Progress() if tip is None else Progress.from_json(tip.manifest["state"]["agent"]),
        silent_for_s=silent_s,
    )


def _state(fs: FileSystem, paths: RunPaths, tip: Checkpoint | None, silent_s: float) -> str:
    """A driver of another host is taken for gone when it has been silent for SILENT_S."""
    lives = driver_lives(read_lease(fs, paths.lease))
    if lives or (lives is None and silent_s < SILENT_S):
        return PLAYING
    if tip is not None and fs.exists(paths.model(tip.ref.generation)):
        return FINISHED
    return STOPPED if fs.exists(paths.stopped) else INTERRUPTED
