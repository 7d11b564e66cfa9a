"""What a model is and needs on a rank, before any run: the entry that `lockstep train --dry-run` starts as one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.training.batches.augmenting import labels_of
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.control.messages import ModelSize, SizeOrder
from lockstep.training.rank.metrics import resident_bytes
from lockstep.training.rank.runtime import configure
from lockstep.training.reading.selecting import selection_of

if TYPE_CHECKING:
    from lockstep.training.control.context import RankContext


def main(context: RankContext) -> dict[str, Any]:
    """Build the model of a SizeOrder as a rank of the run would, and return its ModelSize as JSON.

    Raises ConfigError for a model that cannot be trained so.
    """
    order = SizeOrder.from_json(context.payload)
    config = order.config
    configure(replace(context.world, num_ranks=1), precision=config.step.precision, seed=config.data.seed)
    from lockstep.training.rank.memory import optimizer_bytes, reckoned_bytes, variable_bytes
    from lockstep.training.rank.prepare import check_metrics, metric_names, prepare

    data = TrainingSet.at(config.data.datasets, config.data.split, config.data.mix, selection=selection_of(config))
    signature = labels_of(config, data.encoder.signature)
    before_bytes = resident_bytes()
    plan = data.plan(order.plan)
    model = prepare(config, plan, signature, order.rows, config.step.lane_groups).model
    check_metrics(model, config, None)
    state = variable_bytes(model.weights) + optimizer_bytes(model)
    return ModelSize(
        parameters=int(model.count_params()),
        weights_bytes=variable_bytes(model.weights),
        gradient_bytes=variable_bytes(model.trainable_variables),
        checkpoint_bytes=state,
        rank_bytes=reckoned_bytes(before_bytes, model, config.ranks.num_ranks),
        metrics=list(metric_names(model, config)),
    ).to_json()
