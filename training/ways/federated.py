"""The options of --strategy federated, its clients and privacy among them, and what it cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.training.ways.way import ELASTIC, SUM_IN_EACH_STEP, Refused, Strategy, Way

if TYPE_CHECKING:
    from lockstep.training.config import TrainConfig

# What a global batch of all ranks has, and a client's batch has not; these must have their defaults.
OF_A_GLOBAL_BATCH = (
    "where", "mix", "lanes", "interleave", "cache_groups", "bad_images", "on_bad_record", "augment",
    "learning_rate_scaling", "warm_up_epochs", "shard_embeddings", "compression", "min_ranks", "max_ranks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Federated(Way):
    """The options of --strategy federated."""

    flag: ClassVar[str] = "--strategy federated"
    strategy: ClassVar[Strategy] = "federated"
    otherwise: ClassVar[str] = "another one"
    module: ClassVar[str] = "federated"
    refuses: ClassVar[tuple[Refused, ...]] = (*SUM_IN_EACH_STEP, ELASTIC)

    clients: Annotated[str | None, "FIELD"] = None
    """With --strategy federated, the int64 or string field whose values are the clients: rows with one value are one
    client's, and G is the batch of a client's step."""
    client_fraction: float = 0.1
    """The part of the clients that is drawn for each round."""
    local_epochs: Annotated[int, "E"] = 1
    """Passes of a client over its own samples in a round."""
    update_clip: Annotated[float | None, "NORM"] = None
    """The largest L2 norm of a client's change of the weights; larger ones are scaled to it (default: no limit)."""
    noise_multiplier: Annotated[float, "Z"] = 0.0
    """Standard deviation of the Gaussian noise on the sum of the clients' changes, in units of --update-clip; the run
    then reports epsilon for --privacy-delta (DP-FedAvg)."""
    privacy_delta: Annotated[float | None, "DELTA"] = None
    """With --noise-multiplier, delta of the differential privacy of one client; less than 1 / clients."""
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        self.check("clients", bool(self.clients), "a field of the dataset with --strategy federated")
        self.check("client_fraction", 0 < self.client_fraction <= 1, "above 0, at most 1")
        self.check_count("local_epochs")
        clip, noise, delta = self.update_clip, self.noise_multiplier, self.privacy_delta
        self.check("update_clip", clip is None or 0 < clip < math.inf, "a finite number above 0")
        right = 0 <= noise < math.inf and (noise == 0 or clip is not None)
        self.check("noise_multiplier", right, "0 or more; above 0 only with --update-clip")
        right = (delta is None and noise == 0) or (delta is not None and noise > 0 and 0 < delta < 1)
        self.check("privacy_delta", right, "between 0 and 1 with --noise-multiplier; unset without")
        self.check("outer_learning_rate", 0 < self.outer_learning_rate < math.inf, "above 0")
        self.check("outer_momentum", 0 <= self.outer_momentum < 1, "from 0 to 1")

    def own_faults(self, config: TrainConfig) -> Iterator[tuple[str, str]]:
        given = config.options()
        for name, usual in config.defaults().items():
            if name in OF_A_GLOBAL_BATCH and given[name] != usual:
                yield name, f"{usual} with --strategy federated"
        if config.step.batchnorm == "sync":
            yield "batchnorm", "local with --strategy federated: a client's own batches"
