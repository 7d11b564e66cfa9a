"""What a model is and needs on a rank, before any run: the entry that `lockstep train --dry-run` starts as one rank."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
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

MOST_ROWS = 256  # of the step that is measured; what layers keep grows with the rows


def main(context: RankContext) -> dict[str, Any]:
    """Build the model of a SizeOrder as a rank of the run would, and return its ModelSize as JSON.

    Raises ConfigError for a model that cannot be trained so.
    """
    order = SizeOrder.from_json(context.payload)
    config = order.config
    configure(replace(context.world, num_ranks=1), precision=config.step.precision, seed=config.data.seed)
    from lockstep.training.rank.memory import reckoned_bytes, variable_bytes
    from lockstep.training.rank.prepare import check_metrics, metric_names, prepare

    data = TrainingSet.at(config.data.datasets, config.data.split, config.data.mix, selection=selection_of(config))
    signature = labels_of(config, data.encoder.signature)
    before_bytes = resident_bytes()
    plan = data.plan(order.plan)
    model = prepare(config, plan, signature, order.rows, config.step.lane_groups).model
    check_metrics(model, config, None)
    state = variable_bytes([*model.weights, *model.optimizer.variables])
    return ModelSize(
        parameters=int(model.count_params()),
        weights_bytes=variable_bytes(model.weights),
        gradient_bytes=variable_bytes(model.trainable_variables),
        checkpoint_bytes=state,
        rank_bytes=reckoned_bytes(before_bytes, model, config.ranks.num_ranks),
        kept_bytes=_kept_bytes(model, signature, order.rows // config.step.micro_batches) if config.step.shard_embeddings is None else None,
        metrics=list(metric_names(model, config)),
    ).to_json()


def _kept_bytes(model: keras.Model, signature: Signature, rows: int) -> int:
    """What layers keep of a step of `rows` rows: how much a step on zeros adds to the peak of this process's memory.

    The first step, of two rows, holds gradients and the traced function too. Changes the model.
    """
    from lockstep.training.steps.model_state import zeros_of

    tried = min(rows, MOST_ROWS)
    batches = [zeros_of(signature, count) for count in (min(2, rows), tried)]
    _train_on(model, batches[0])
    before = _peak_bytes()
    _train_on(model, batches[1])
    return (_peak_bytes() - before) * rows // tried


def _train_on(model: keras.Model, batch: Any) -> None:
    model.train_on_batch(*(batch if isinstance(batch, tuple) else (batch,)))


def _peak_bytes() -> int:
    """The most memory that this process has had; psutil does not know it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) << 10 if found else 0
