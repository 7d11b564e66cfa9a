"""The options of --strategy async, its bound of staleness among them, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, MEETING_BATCHNORM, SUM_IN_EACH_STEP, Refused, Strategy, Way

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchronous(Way):
    """The options of --strategy async."""

    flag: ClassVar[str] = "--strategy async"
    strategy: ClassVar[Strategy] = "async"
    module: ClassVar[str] = "asynchronous"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, COMPRESSION, MEETING_BATCHNORM)

    staleness: Annotated[int | None, "S"] = None
    gradient_noise: Annotated[float, "ETA"] = 0.0
    """With --strategy async, the variance ETA / (1 + step)**0.55 of Gaussian noise that is added to each gradient."""

    def __post_init__(self) -> None:
        given = self.staleness is not None and 0 <= self.staleness < 2**31
        self.check("staleness", given, "steps from 0 up with --strategy async")
        self.check("gradient_noise", 0 <= self.gradient_noise < math.inf, "0 or more")

    def runs(self, num_ranks: int) -> bool:
        return bool(self.staleness) and num_ranks > 1

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if self.gradient_noise and not self.runs(config.ranks.num_ranks):
            yield "gradient_noise", "0 unless several ranks train with --strategy async --staleness S"
