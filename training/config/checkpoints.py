"""When a run writes checkpoints, and which of them it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.training.parts import Part
from lockstep.training.rules import ALLOWED, BEST, BEST_ALLOWED, CheckpointEvery, Keep


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Part):
    """Checkpoints. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "checkpoints (docs/guarantees.md)"

    checkpoint_every: Annotated[int | str, "N|Ns|auto"] = 200
    """Steps between checkpoints, seconds (60s), or auto: the interval that loses least time by their measured cost. One
    more is written at the end."""
    keep_checkpoints: Annotated[int, "K"] = 3
    """How many of the newest checkpoints are kept."""
    keep_every: Annotated[int | None, "M"] = None
    """Also keep the first checkpoint at or after each multiple of M steps."""
    keep_best: Annotated[str | None, "METRIC:max"] = None
    """Also keep the checkpoint that is best at the end of an epoch, whose weights the run's model gets; METRIC:max or
    METRIC:min, val_METRIC with --validate, else a metric of the training rows."""

    def __post_init__(self) -> None:
        try:
            every = CheckpointEvery.parse(self.checkpoint_every)
        except ValueError:
            self.check("checkpoint_every", False, ALLOWED)
        else:
            object.__setattr__(self, "checkpoint_every", every.steps or self.checkpoint_every)
        self.check_count("keep_checkpoints")
        self.check("keep_every", self.keep_every is None or self.keep_every >= 1, "steps from 1 up")
        self.check("keep_best", self.keep_best is None or BEST.fullmatch(self.keep_best) is not None, BEST_ALLOWED)

    @property
    def keep(self) -> Keep:
        """Which checkpoints are kept."""
        return Keep(self.keep_checkpoints, self.keep_every, self.keep_best)
