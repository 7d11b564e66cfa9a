"""The option of --tensor-parallel, and what it cannot be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.training.ways.way import COMPRESSION, ELASTIC, SHARDS, SUM_IN_EACH_STEP, Refused, Way
from lockstep.training.ways.zero import BALANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel(Way):
    """The option of --tensor-parallel."""

    flag: ClassVar[str] = "--tensor-parallel"
    option: ClassVar[str] = "tensor_parallel"
    otherwise: ClassVar[str] = "1"
    module: ClassVar[str] = "tensor_parallel"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, COMPRESSION, SHARDS, BALANCE, ELASTIC)

    tensor_parallel: Annotated[int, "T"] = 1
    """Ranks that divide the model's layers among them, and read the same rows: each has 1/T of the weights of layers
    that the model declares (docs/strategies.md)."""

    def __post_init__(self) -> None:
        self.check_count("tensor_parallel")

    @property
    def mates(self) -> tuple[int, int]:
        return 1, self.tensor_parallel
