"""What happens in a step of the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lockstep.training.compression.method import ALLOWED as ALLOWED_COMPRESSION
from lockstep.training.compression.method import Compression
from lockstep.training.parts import MOST, Part
from lockstep.training.ways import Strategy

BatchNorm = Literal["ghost", "sync", "local"]
Precision = Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"]
ScalingRule = Literal["none", "linear", "sqrt"]
LANE_GROUPS = 8  # of ghost BatchNorm: its statistics cover G / 8 samples for any number of ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig(Part):
    """A step, but for the options of the way to exchange. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "a step (docs/models.md)"

    batchnorm: BatchNorm = "ghost"
    """Rows that batch normalisation takes statistics over: an eighth of the global batch (ghost, up to 8 ranks), all of
    it (sync), or a rank's part (local). With ghost and sync they do not depend on the number of ranks."""
    learning_rate: float | None = None
    """The optimizer's learning rate (default: the model's own)."""
    learning_rate_scaling: ScalingRule = "none"
    """How the learning rate grows with G / --base-batch."""
    base_batch: Annotated[int | None, "B"] = None
    """The global batch that the learning rate was tuned for; with --learning-rate-scaling."""
    warm_up_epochs: Annotated[float, "E"] = 0.0
    """Epochs during which the learning rate rises to its full value."""
    micro_batches: Annotated[int, "K"] = 1
    """Parts in which a rank computes its batch, for less memory; their gradients are added."""
    strategy: Strategy = "sync"
    """sync adds gradients of all ranks in each step; async lets each rank apply its own at once and those of others as
    they arrive; parameter-server lets processes of their own apply each rank's; with these two no bits are the same in
    two runs. federated trains a few --clients in each round; a step and an epoch are a round. mirrored and
    multi-worker-mirrored are TensorFlow's own, on the devices of one rank and of all ranks (docs/strategies.md)."""
    shard_embeddings: Annotated[int | None, "FROM_BYTES"] = None
    """Divide tables of embeddings of at least so many bytes over the ranks: two-tower and wide-deep
    (docs/embeddings.md; default: each rank has all tables)."""
    compression: Annotated[str, "METHOD"] = "none"
    """How gradients are sent: none, bf16, fp16, int8, 1bit, qsgd:LEVELS, terngrad, topk:1%, dgc:0.1%, powersgd:2 or
    auto, which compresses where it pays (docs/compression.md)."""
    precision: Precision = "float32"
    """Keras' floatx, or a dtype policy: weights in float32, layers in float16 (with loss scaling) or bfloat16."""

    def __post_init__(self) -> None:
        self.check_choices()
        rate, base, scales = self.learning_rate, self.base_batch, self.learning_rate_scaling != "none"
        self.check("learning_rate", rate is None or 0 < rate < math.inf, "a finite number above 0")
        self.check("base_batch", base is None or scales, "unset, unless --learning-rate-scaling is given")
        self.check("base_batch", base is not None or not scales, "with scaling: the batch that the rate was tuned for")
        self.check("base_batch", base is None or base >= 1, "an integer from 1 up")
        self.check("warm_up_epochs", self.warm_up_epochs >= 0, "from 0 to fewer than epochs")
        self.check_count("micro_batches")
        least = self.shard_embeddings
        self.check("shard_embeddings", least is None or 0 <= least < MOST, "bytes from 0 up")
        try:
            Compression.parse(self.compression)
        except ValueError:
            self.check("compression", False, ALLOWED_COMPRESSION)

    @property
    def lane_groups(self) -> int | None:
        """The number of lane groups that are not divided between ranks; None if ranks may own any lanes."""
        return LANE_GROUPS if self.batchnorm == "ghost" else None
