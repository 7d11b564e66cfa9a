"""Exports the model of a run that has ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.comm.base import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.embeddings.sharded_embedding import check_fits
from lockstep.training.exchange.compare_ranks import view_of
from lockstep.training.models.lora import merged_model
from lockstep.training.models.on_disk import export, plain_model
from lockstep.training.models.policy import Policy
from lockstep.training.models.tasks import TaskModel
from lockstep.training.rank.prepare import JoinedModel
from lockstep.training.run.checkpoint import write_bytes
from lockstep.training.run.paths import staged_model
from lockstep.training.steps.distribute import own_class
from lockstep.training.steps.model_state import (
    OPTIMIZER,
    WEIGHTS,
    WHOLE,
    divided_kinds,
    divided_variables,
    gathered_on_first,
    load,
    make_whole,
    tensors_of,
    whole_state,
)
from lockstep.training.steps.patching import swapped
from lockstep.training.ways import Zero

END = -1  # in place of a variable's number
log = logging.getLogger(__name__)


def export_model(
    context: RankContext,
    config: TrainConfig,
    data: TrainingSet,
    model: keras.Model,
    signature: Signature,
    staging: str,
    more: Mapping[str, bytes],
) -> None:
    """Upload the final model, with `more` files by name, and have the driver publish it; only on rank 0."""
    if isinstance(model, Policy | TaskModel):
        model = model.deployed()
    files: list[dict[str, Any]] = export(
        model, staged_model(staging), config.data.datasets[0], data.manifest, signature
    )
    files += [write_bytes(staged_model(staging), name, data) for name, data in more.items()]
    context.control.request("model", config.limits.stall_limit_s, files=files)


@contextmanager
def pieces_for_first(config: TrainConfig, model: keras.Model, communicator: Communicator) -> Iterator[None]:
    """While this is open on rank 0, it can save a model whose variables are divided over the ranks: it asks the others
    for one variable after another, and Keras writes each to the disk. Others answer before it opens for them.

    A collective.
    """
    divided = list(divided_variables(model).values())
    if not (divided and isinstance(config.way, Zero)):
        yield
        return
    numbers = {id(variable): number for number, variable in enumerate(divided)}
    asked = np.zeros(1, np.int64)

    def whole_of(variable: keras.Variable) -> NDArray[Any]:
        if (number := numbers.get(id(variable))) is None:
            return np.array(view_of(variable))
        asked[0] = number
        communicator.broadcast(asked)
        return gathered_on_first(variable, communicator)

    if communicator.rank:
        communicator.broadcast(asked)
        while asked[0] != END:
            gathered_on_first(divided[int(asked[0])], communicator)
            communicator.broadcast(asked)
        yield
        return
    before = WHOLE.set(whole_of)
    try:
        with swapped(saving_lib, "is_memory_sufficient", lambda _model: False):  # else Keras writes to memory
            yield
    finally:
        WHOLE.reset(before)
        asked[0] = END
        communicator.broadcast(asked)


def whole_model(
    context: RankContext, config: TrainConfig, joined: JoinedModel, signature: Signature
) -> keras.Model | None:
    """The trained model, with Embedding layers in place of tables in shards: then it is on rank 0 only, and None unless
    it fits there. What a stage or a part of a layer has is whole on rank 0; what --zero divides is not, and
    `pieces_for_first` saves it. With --lora-rank it is a plain model on rank 0. A collective.
    """
    if config.model.lora_rank:
        return merged_model(joined.model, config, signature) if context.world.is_leader else None
    if (kinds := divided_kinds(joined.model)) and not isinstance(config.way, Zero):
        context.control.beat(context.control.step, "gather what ranks have parts of")
        kinds = tuple(dict.fromkeys((*kinds, OPTIMIZER)))  # an SGD without momentum has no state that is divided
        whole = whole_state(joined.model, joined.strategy.communicator, *kinds)
        if whole is not None:
            make_whole(joined.model, whole)
            joined.strategy.undivide(joined.model)
            divided = joined.model.optimizer
            joined.model.optimizer = own_class(divided).from_config(divided.get_config())
            joined.model.optimizer.build(joined.model.trainable_variables)
            of_optimizer = {name: value for name, value in whole.items() if name.split("/")[0] == OPTIMIZER}
            load(joined.model, of_optimizer, (OPTIMIZER,), "the trained model")
        return joined.model
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
