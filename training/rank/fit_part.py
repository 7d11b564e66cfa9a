"""A rank's training: what the driver's task calls in each process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.comm.options import UNAUTHENTICATED
from training.config import TrainConfig
from training.rank import runtime

if TYPE_CHECKING:
    from training.control.context import RankContext


def main(context: RankContext) -> dict[str, Any]:
    """Train from the chain's tip to the end of the configured epochs; the payload is {config, plan}.

    Returns {steps, epochs, metrics (last epoch's, over all ranks), samples, seconds, left_over (hex, rank 0 alone)}.
    Raises ConfigError and DataError for what a restart would meet again, CommunicationError for a lost rank.
    """
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed, canonical=config.canonical)
    if config.backend in UNAUTHENTICATED:
        context.communicator()  # TensorFlow's server must be there before its first tensor
    from training.rank.fit import Fit  # TensorFlow is imported now that its settings are made

    with Fit(context, config) as fit:
        return fit.run()
