"""The order of forward and backward passes of a pipeline's stages: GPipe's, or one forward, one backward (1F1B).

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (NeurIPS 2019); Narayanan
et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), with one update a step as in
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021). In both a
stage waits (p - 1) / (m + p - 1) of a step, with p stages that take equal times and m micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.training.ways.pipeline import Schedule


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch."""

    forward: bool
    micro: int


def passes_of(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The passes of `stage`, of 0 to stages - 1, in their order.

    Backward passes have the order of the micro-batches in both, so that gradients are added in one order. With gpipe a
    stage holds all micro-batches between their passes, with 1f1b at most stages - stage.
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    found = [Pass(True, micro) for micro in range(ahead)]
    for micro in range(micro_batches):
        found.append(Pass(False, micro))
        if ahead + micro < micro_batches:
            found.append(Pass(True, ahead + micro))
    return found


def most_held(passes: list[Pass]) -> int:
    """The most micro-batches whose forward pass is done and whose backward pass is not."""
    held = most = 0
    for one in passes:
        held += 1 if one.forward else -1
        most = max(most, held)
    return most
