"""The option of --delay, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, SUM_OF_EACH_BATCH, Refused, Way

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay(Way):
    """The options of --delay."""

    flag: ClassVar[str] = "--delay"
    option: ClassVar[str] = "delay"
    otherwise: ClassVar[str] = "0"
    module: ClassVar[str] = "delay"
    refuses: ClassVar[tuple[Refused, ...]] = SUM_OF_EACH_BATCH

    delay: Annotated[int, "D"] = 0
    """Steps by which a sum of gradients is applied late, so that ranks add gradients while they compute the next ones
    (docs/strategies.md)."""

    def __post_init__(self) -> None:
        self.check("delay", 0 <= self.delay < 2**31, "an integer from 0 up")

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if COMPRESSION.wrong(config.step.compression):
            yield "compression", "none with --delay"
