"""The options of --strategy layers, and what it cannot be combined with."""

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
)
from lockstep.training.ways.zero import BALANCE

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig
    from lockstep.training.world import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers(Way):
    """The options of --strategy layers."""

    flag: ClassVar[str] = "--strategy layers"
    strategy: ClassVar[Strategy] = "layers"
    module: ClassVar[str] = "layers"
    refuses: ClassVar[tuple[Refused, ...]] = (
        *SUM_IN_EACH_STEP,
        COMPRESSION,
        MEETING_BATCHNORM,
        ELASTIC,
        SHARDS,
        BALANCE,
    )

    sync_every: Annotated[int, "K"] = 1

    def __post_init__(self) -> None:
        self.check("sync_every", 1 <= self.sync_every < 2**31, "steps from 1 up with --strategy layers")

    def runs(self, num_ranks: int) -> bool:
        return num_ranks > 1

    def grid(self, num_ranks: int) -> Grid:
        """All ranks read the same rows."""
        from lockstep.training.world import Grid  # not for the --help of each command

        return Grid(1, num_ranks)

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        most = config.validation.max_steps
        if most is not None and most % self.sync_every:
            yield "max_steps", "a multiple of --sync-every"
