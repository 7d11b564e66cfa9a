"""The option of --zero, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, SHARDS, SUM_IN_EACH_STEP, Refused, Way, other_than

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

BALANCE = other_than("ranks.balance", False, "--balance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero(Way):
    """The option of --zero."""

    flag: ClassVar[str] = "--zero"
    option: ClassVar[str] = "zero"
    otherwise: ClassVar[str] = "0"
    module: ClassVar[str] = "zero"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, COMPRESSION, SHARDS, BALANCE)

    zero: Annotated[int, "STAGE"] = 0
    """What each rank holds only its part of, for equal weights with less memory: 1 the optimizer's state, 2 the
    gradients too, 3 the weights too; 0 nothing (docs/strategies.md)."""

    def __post_init__(self) -> None:
        self.check("zero", self.zero in (0, 1, 2, 3), "0, 1, 2 or 3")

    def faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        yield from Way.faults(self, config)
        if self.zero == 3 and config.step.batchnorm == "sync":
            yield "zero", "0, 1 or 2 with --batchnorm sync, whose ranks meet within layers"

    @property
    def stage(self) -> int:
        return self.zero

    def runs(self, num_ranks: int) -> bool:
        return num_ranks > 1
