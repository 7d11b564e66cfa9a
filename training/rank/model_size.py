"""What a model is and needs on a rank, before any run: the entry that `lockstep train --dry-run` starts as one rank."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from lockstep.training.batches.augmenting import labels_of
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.control.messages import ModelSize, SizeOrder
from lockstep.training.rank.metrics import resident_bytes
from lockstep.training.rank.runtime import configure
from lockstep.training.reading.selecting import selection_of

if TYPE_CHECKING:
    import keras

    from lockstep.features.schema.signature import Signature
    from lockstep.training.control.context import RankContext

BACKWARD = "gradient_tape"  # in the names of TensorFlow's operations of a backward pass
OTHER_INPUTS = ("ReadVariableOp", "Const", "Placeholder")  # of it: what is there without the forward pass


def main(context: RankContext) -> dict[str, Any]:
    """Build the model of a SizeOrder as a rank of the run would, and return its ModelSize as JSON.

    Raises ConfigError for a model that cannot be trained so.
    """
    order = SizeOrder.from_json(context.payload)
    config = order.config
    configure(replace(context.world, num_ranks=1), precision=config.step.precision, seed=config.data.seed)
    import keras

    from lockstep.training.rank.memory import optimizer_bytes, reckoned_bytes, variable_bytes
    from lockstep.training.rank.prepare import check_metrics, metric_names, prepare

    data = TrainingSet.at(
        config.data.datasets,
        config.data.split,
        config.data.mix,
        selection=selection_of(config),
        tasks=config.data.tasks is not None,
    )
    signature = labels_of(config, data.encoder.signature)
    before_bytes = resident_bytes()
    plan = data.plan(order.plan)
    model = prepare(config, plan, signature, order.rows, config.step.lane_groups).model
    check_metrics(model, config, None)
    plain = config.step.shard_embeddings is None and type(model).train_step is keras.Model.train_step
    state = variable_bytes(model.weights) + optimizer_bytes(model)
    return ModelSize(
        parameters=int(model.count_params()),
        weights_bytes=variable_bytes(model.weights),
        gradient_bytes=variable_bytes(model.trainable_variables),
        checkpoint_bytes=state,
        rank_bytes=reckoned_bytes(before_bytes, model, config.ranks.num_ranks, config.way.stage),
        kept_bytes=kept_bytes(model, signature, order.rows // config.step.micro_batches) if plain else None,
        metrics=list(metric_names(model, config)),
        step_s=step_s(model, signature, order.rows) if order.timed else None,
    ).to_json()


def step_s(model: keras.Model, signature: Signature, rows: int) -> float:
    """Seconds of a step on a batch of zeros: the median of three, after one that traces."""
    from lockstep.training.steps.model_state import zeros_of

    batch, seconds = zeros_of(signature, rows), []
    batch = batch if isinstance(batch, tuple) else (batch,)
    model.train_on_batch(*batch)
    for _ in range(3):
        began = time.perf_counter()
        model.train_on_batch(*batch)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def kept_bytes(model: keras.Model, signature: Signature, rows: int) -> int:
    """What the forward pass of a traced step on `rows` rows hands to the backward pass, without weights and loops."""
    import tensorflow as tf

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(x, training=True))
            loss = tf.add_n([tf.reduce_sum(tf.cast(output, tf.float32)) for output in outputs])
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    specs = {name: tf.TensorSpec((rows, *spec.shape), spec.dtype) for name, spec in signature.features.items()}
    graph = tf.function(step, autograph=False).get_concrete_function(specs).graph
    forward = (op for op in graph.get_operations() if BACKWARD not in op.name and op.type not in OTHER_INPUTS)
    return sum(
        math.prod(tensor.shape) * tensor.dtype.size
        for op in forward
        for tensor in op.outputs
        if tensor.shape.is_fully_defined() and any(BACKWARD in each.name for each in tensor.consumers())
    )
