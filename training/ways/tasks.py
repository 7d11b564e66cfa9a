"""The options of --strategy tasks, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import (
    COMPRESSION,
    ELASTIC,
    MEETING_BATCHNORM,
    SHARDS,
    SUM_IN_EACH_STEP,
    Refused,
    Strategy,
    Way,
    other_than,
)
from lockstep.training.ways.zero import BALANCE

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

AUDIT = other_than("exactness.audit", False, "--audit", ", which lists whole global batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks(Way):
    """The options of --strategy tasks."""

    flag: ClassVar[str] = "--strategy tasks"
    strategy: ClassVar[Strategy] = "tasks"
    module: ClassVar[str] = "tasks"
    refuses: ClassVar[tuple[Refused, ...]] = (
        *SUM_IN_EACH_STEP,
        COMPRESSION,
        MEETING_BATCHNORM,
        ELASTIC,
        SHARDS,
        BALANCE,
        AUDIT,
    )

    sync_every: Annotated[int, "K"] = 1

    def __post_init__(self) -> None:
        self.check("sync_every", 1 <= self.sync_every < 2**31, "steps from 1 up with --strategy tasks")

    def task_of(self, config: TrainConfig, rank: int) -> tuple[int, int]:
        """The task of a rank, and how many ranks train it."""
        each = config.ranks.num_ranks // len(config.data.datasets)
        return rank // each, each

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if config.data.tasks != "equal":
            yield "tasks", "equal with --strategy tasks: each rank has the loss of one task, without a weight"
        if config.ranks.num_ranks % len(config.data.datasets):
            yield "num_ranks", f"a multiple of {len(config.data.datasets)}, the datasets, with --strategy tasks"
        most = config.validation.max_steps
        if most is not None and most % self.sync_every:
            yield "max_steps", "a multiple of --sync-every"
