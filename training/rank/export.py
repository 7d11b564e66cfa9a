"""Exports the model of a run that has ended."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.embeddings.sharded_embedding import check_fits
from lockstep.training.models.on_disk import export, plain_model
from lockstep.training.models.policy import Policy
from lockstep.training.rank.prepare import JoinedModel
from lockstep.training.run.paths import staged_model
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.model_state import OPTIMIZER, WEIGHTS, load, pieces_of, tensors_of, whole_optimizer

log = logging.getLogger(__name__)


def export_model(
    context: RankContext, config: TrainConfig, data: TrainingSet, model: keras.Model, signature: Signature, staging: str
) -> None:
    """Upload the final model and have the driver publish it; only on rank 0."""
    files: list[dict[str, Any]] = export(
        model, staged_model(staging), config.data.datasets[0], data.manifest, signature
    )
    context.control.request("model", config.limits.stall_limit_s, files=files)


def whole_model(
    context: RankContext, config: TrainConfig, joined: JoinedModel, signature: Signature
) -> keras.Model | None:
    """The trained model, with Embedding layers in place of tables in shards: then it is on rank 0 only, and None unless
    it fits there. A divided optimizer is whole on rank 0. A collective.
    """
    if pieces_of(joined.model):
        context.control.beat(context.control.step, "gather the optimizer's state")
        whole_state = whole_optimizer(joined.model, joined.strategy.communicator)
        if whole_state is not None:
            divided = joined.model.optimizer
            joined.model.optimizer = own_class(divided).from_config(divided.get_config())
            joined.model.optimizer.build(joined.model.trainable_variables)
            load(joined.model, whole_state, (OPTIMIZER,), "the trained model")
        return joined.model
    if isinstance(joined.model, Policy):
        return joined.model.deployed()
    if (tables := joined.tables) is None:
        return joined.model
    context.control.beat(context.control.step, "gather the tables")
    unfit = np.zeros(1, np.uint8)
    specs, _ = tables.state()
    if context.world.is_leader:
        try:
            check_fits(specs, "the tables of the trained model")
        except ConfigError as error:
            log.warning("the run ends with a checkpoint and no exported model: %s", error)
            unfit[0] = 1
    joined.strategy.communicator.broadcast(unfit)
    if unfit[0] or (whole := tables.whole()) is None:
        return None
    tensors = tensors_of(joined.model, WEIGHTS) | whole
    plain = plain_model(config, signature, tensors, "the trained model")
    plain.optimizer.build(plain.trainable_variables)  # Keras warns when it loads one that was saved unbuilt
    return plain
