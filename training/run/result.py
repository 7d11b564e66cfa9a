"""What a finished run says of itself."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a finished run leaves in results/gNNNN.json."""

    run: str
    generation: int
    steps: int
    epochs: int
    metrics: dict[str, Any]
    """Of the last epoch."""
    samples: int
    """Trained on by this generation."""
    seconds: float
    """That this generation trained for."""
    samples_per_s: float
    restarts: int
    """By this driver."""
    checkpoint: str | None
    """The chain's tip: a name in checkpoints/."""
    model: str | None
    """URL of the final export."""
    left_over: list[str]
    """Sample ids (hex) that fill no global batch."""
    class_counts: list[int] | None = None
    """Rows of each class in the last epoch, as far as this generation was fed it; None where labels are no classes."""
    restart_log: list[dict[str, Any]] = field(default_factory=list)
    """Of each of these restarts {generation, level, seconds, parts} (training.launch.restarts)."""

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object, the form of the result's file (unsealed)."""
        return {
            "format_version": FORMAT_VERSION,
            "kind": "result",
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def summary(self) -> str:
        """What was done, in a few lines."""
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items() if isinstance(value, float))
        return (
            f"{self.run}: {self.steps} steps, {self.epochs} epochs, {self.samples_per_s:.0f} samples/s, "
            f"{self.restarts} restarts, {len(self.left_over)} samples left over\n"
            f"last epoch: {numbers}\ncheckpoint {self.checkpoint}\nmodel {self.model}"
        )
