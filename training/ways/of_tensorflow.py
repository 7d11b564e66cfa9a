"""The options of TensorFlow's own strategies, and what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import (
    COMPRESSION,
    ELASTIC,
    SHARDS,
    SUM_IN_EACH_STEP,
    SYNC_BATCHNORM,
    Refused,
    Strategy,
    Way,
)

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTensorflow(Way):
    """A way of tf.distribute."""

    module: ClassVar[str] = "mirrored"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, ELASTIC, COMPRESSION, SYNC_BATCHNORM, SHARDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored(OfTensorflow):
    """The options of --strategy mirrored."""

    flag: ClassVar[str] = "--strategy mirrored"
    strategy: ClassVar[Strategy] = "mirrored"

    devices: Annotated[int | None, "K"] = None
    """With --strategy mirrored, the devices that divide each batch: GPUs, or logical CPU devices where there is no GPU
    (default: all GPUs, or one CPU device)."""

    def __post_init__(self) -> None:
        self.check("devices", self.devices is None or self.devices >= 1, "devices from 1 up with --strategy mirrored")

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if config.ranks.num_ranks != 1:
            yield "num_ranks", "1 with --strategy mirrored: its devices are in one process"


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiWorkerMirrored(OfTensorflow):
    """The way of --strategy multi-worker-mirrored, which has no options."""

    flag: ClassVar[str] = "--strategy multi-worker-mirrored"
    strategy: ClassVar[Strategy] = "multi-worker-mirrored"

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        if config.ranks.trust_network is None:
            trust = "a network that only ranks can reach: TensorFlow's servers do not authenticate their peers"
            yield "trust_network", trust
