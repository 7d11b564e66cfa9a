"""How long a driver waits for ranks, and how often it starts them again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lockstep.training.parts import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig(Part):
    """Limits and restarts. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "limits and restarts (docs/operations.md)"

    start_limit_s: float = 300.0
    """Seconds in which all ranks must start."""
    stall_limit_s: float = 600.0
    """Seconds without a step after which ranks are ended and started again."""
    stop_grace_s: float = 30.0
    """Seconds in which all ranks must write a checkpoint after SIGTERM or Ctrl-C; then they are ended without one."""
    heartbeat_limit_s: float | None = None
    """Seconds of silence after which a rank is lost; raise it where hosts pause or swap (default 10)."""
    max_restarts: int = 3
    """Restarts in a row without a new checkpoint before the run fails."""
    max_restarts_per_hour: int = 20
    """Restarts within an hour before the run fails, with new checkpoints or without."""

    def __post_init__(self) -> None:
        self.check("start_limit_s", 0 < self.start_limit_s < math.inf, "seconds above 0")
        self.check("stall_limit_s", 0 < self.stall_limit_s < math.inf, "seconds above 0")
        self.check("stop_grace_s", 0 <= self.stop_grace_s < math.inf, "seconds from 0 up")
        silent = self.heartbeat_limit_s
        self.check("heartbeat_limit_s", silent is None or 2 <= silent < math.inf, "seconds from 2 up: two beats")
        self.check("max_restarts", self.max_restarts >= 0, "an integer from 0 up")
        self.check("max_restarts_per_hour", self.max_restarts_per_hour >= 0, "an integer from 0 up")
