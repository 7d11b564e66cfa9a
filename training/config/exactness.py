"""What a run promises of its samples and sums, and how it treats what breaks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.training.parts import Part

NonFinite = Literal["stop", "skip"]
OnBadRecord = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactnessConfig(Part):
    """Exactly once. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "exactly once (docs/guarantees.md)"

    non_finite: NonFinite = "stop"
    """How to treat a loss or gradient that is not finite: stop the run, or skip the step on all ranks, up to 10 in a
    row. A step with a scaled loss is always skipped."""
    on_bad_record: OnBadRecord = "stop"
    """How to treat a record that cannot be decoded: stop the run, or let it keep its place with weight 0 (skip), which
    includes --bad-images skip. In Parquet and gzip shards skip leaves out all records of its block."""
    canonical: bool = False
    """Train the same weights, bit for bit, on 1, 2, 4, ... ranks; slower. Each lane group (or lane) is computed by
    itself, and gradients are added in one fixed tree."""
    audit: bool = False
    """List the id of each sample that was trained on, in RUN/audit."""

    def __post_init__(self) -> None:
        self.check_choices()
