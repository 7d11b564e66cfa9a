"""The options of --pipeline-stages, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from lockstep.training.ways.way import (
    CANONICAL,
    COMPRESSION,
    ELASTIC,
    EWC,
    OWN_LINKS,
    SCALED_LOSS,
    SHARDS,
    SKIPPED,
    SYNC_BATCHNORM,
    Refused,
    Way,
)
from lockstep.training.ways.zero import BALANCE

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline(Way):
    """The options of --pipeline-stages."""

    flag: ClassVar[str] = "--pipeline-stages"
    option: ClassVar[str] = "pipeline_stages"
    otherwise: ClassVar[str] = "1"
    module: ClassVar[str] = "pipeline"
    refuses: ClassVar[tuple[Refused, ...]] = (
        CANONICAL,
        SCALED_LOSS,
        SKIPPED,
        OWN_LINKS,
        EWC,
        COMPRESSION,
        SYNC_BATCHNORM,
        ELASTIC,
        SHARDS,
        BALANCE,
    )

    pipeline_stages: Annotated[int, "P"] = 1
    """Stages of layers that the model is cut into, each on ranks of its own, which pass --micro-batches on to each
    other (docs/strategies.md)."""
    schedule: Schedule = "1f1b"
    """With --pipeline-stages, the order of passes: 1f1b holds at most P micro-batches on a rank, gpipe all of them."""
    cut_after: Annotated[str, "LAYERS"] = ""
    """With --pipeline-stages, names of the layers after which stages end, by commas (default: stages of equal reckoned
    time)."""

    def __post_init__(self) -> None:
        self.check("pipeline_stages", 1 <= self.pipeline_stages < 2**15, "an integer from 1 up")
        self.check_choices()

    @property
    def mates(self) -> tuple[int, int]:
        return self.pipeline_stages, 1

    @property
    def layers(self) -> tuple[str, ...]:
        """The names in `cut_after`."""
        return tuple(name.strip() for name in self.cut_after.split(",") if name.strip())

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if self.layers and len(self.layers) != self.pipeline_stages - 1:
            yield "cut_after", f"names of {self.pipeline_stages - 1} layers, one for each stage but the last"
