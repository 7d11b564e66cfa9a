"""When a run is validated, and what ends it before its last epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.training.parts import MOST, Part
from lockstep.training.rules import STOP_ALLOWED, StopRule, of_validation


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig(Part):
    """Validation, and ends before the last epoch. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "validation, and ends before the last epoch (docs/validation.md)"

    validate: Annotated[str | None, "SPLIT"] = None
    """A split of the same datasets to score the model on after an epoch, over all ranks; its metrics are val_METRIC, as
    lockstep evaluate computes them (default: none)."""
    validate_every: Annotated[int, "E"] = 1
    """Epochs from one validation to the next; there is one more at the end of the run."""
    early_stop: Annotated[str | None, "METRIC:max:K"] = None
    """End the run when METRIC has not improved in K validations (of a training metric, K epochs); METRIC:max:K or
    METRIC:min:K, such as val_auc:max:3."""
    max_steps: Annotated[int | None, "N"] = None
    """End the run after N steps, if its epochs have more; a later call with more steps, or without this flag, resumes
    it."""

    def __post_init__(self) -> None:
        self.check_count("validate_every")
        self.check("max_steps", self.max_steps is None or 1 <= self.max_steps < MOST, "an integer from 1 up")
        if self.early_stop is not None:
            try:
                StopRule.parse(self.early_stop)
            except ValueError:
                self.check("early_stop", False, STOP_ALLOWED)
        right = self.validate is not None or not of_validation(self.early_stop)
        self.check("early_stop", right, "a training metric, unless --validate SPLIT is given")
