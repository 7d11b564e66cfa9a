"""The options of --sync-every, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, MEETING_BATCHNORM, SUM_OF_EACH_BATCH, Refused, Way

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSteps(Way):
    """The options of --sync-every."""

    flag: ClassVar[str] = "--sync-every"
    option: ClassVar[str] = "sync_every"
    otherwise: ClassVar[str] = "1"
    module: ClassVar[str] = "local_steps"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_OF_EACH_BATCH, MEETING_BATCHNORM)

    sync_every: Annotated[int, "K"] = 1
    """Steps after which ranks meet: 1 adds gradients in each step; K averages the models of ranks that trained by
    themselves for K steps; 0 averages once, at the end of the run (docs/strategies.md). With --strategy layers ranks
    swap their blocks."""
    sync_until_epoch: Annotated[int, "E"] = 0
    """Epochs that add gradients in each step before --sync-every begins."""
    outer_learning_rate: float = 1.0
    """With --sync-every or --strategy federated, the rate of a step along the averaged change since the last meeting or
    round; 1 is the average."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the step along the averaged change (--outer-learning-rate)."""

    def __post_init__(self) -> None:
        self.check("sync_every", 0 <= self.sync_every < 2**31, "an integer from 0 up")
        rate, momentum, meets = self.outer_learning_rate, self.outer_momentum, self.sync_every > 1
        self.check("outer_learning_rate", 0 < rate < math.inf and (meets or rate == 1), "above 0; 1 without meetings")
        self.check("outer_momentum", 0 <= momentum < 1 and (meets or momentum == 0), "from 0 to 1; 0 without meetings")

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if COMPRESSION.wrong(config.step.compression):
            yield "compression", "none with --sync-every, which adds no gradients"
        most = config.validation.max_steps
        if most is not None and (self.sync_every == 0 or most % self.sync_every):
            yield "max_steps", "a multiple of --sync-every; unset with --sync-every 0"
        if self.sync_every == 0 and (config.validation.validate or config.checkpoints.keep_best):
            yield "sync_every", "1 or more with --validate or --keep-best: ranks differ until the end"
        if not 0 <= self.sync_until_epoch < config.data.epochs:
            yield "sync_until_epoch", "from 0 to fewer than epochs"
