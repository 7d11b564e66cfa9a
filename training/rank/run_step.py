"""A run's training step: whole parts of a batch, or unit by unit, and what its exchange is made of."""

from __future__ import annotations

from training.comm.base import Communicator
from training.comm.tree_sums import TreeSums
from training.config import TrainConfig
from training.plan.canonical import units_of
from training.plan.mixture import Plan
from training.rank.prepare import Prepared
from training.steps.batchnorm import statistics_of
from training.steps.canonical import CanonicalStep
from training.steps.distribute import distribute
from training.steps.rank_step import RankStep


def distributed(
    config: TrainConfig, plan: Plan, prepared: Prepared, communicator: Communicator, rows: int, groups: int | None
) -> RankStep | CanonicalStep:
    """The step of a rank of `rows` rows, to be installed; the model's optimizer is distributed over the ranks."""
    model, scale = prepared.model, rows / plan.global_batch
    statistics = tuple(statistics_of(model))
    step: RankStep | CanonicalStep
    if config.canonical:
        units = units_of(config, plan.lanes, groups)
        count = units // communicator.num_ranks
        step = CanonicalStep(
            model,
            units=units,
            first=communicator.rank * count,
            count=count,
            seed=config.seed,
            group_rows=prepared.group_rows,
        )
        communicator, scale, statistics = TreeSums(communicator), 1.0, (*statistics, *step.metric_sums)
    else:
        step = RankStep(
            scale,
            group_rows=prepared.group_rows,
            sync=config.batchnorm == "sync",
            micro_batches=config.micro_batches,
            seed=config.seed,
        )
    distribute(
        model.optimizer,
        communicator,
        scale,
        statistics=statistics,
        auto_scale_loss=False,  # compile has decided
        finalizes=False,  # one fit call is one epoch
        same_start=not config.canonical,  # shares of 1 add up to no whole; the run compares weights by itself
    )
    return step
