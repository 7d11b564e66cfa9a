"""What ranks do before the first step and after the last: they compare themselves, export, list what is left over."""

from __future__ import annotations

from typing import Any

import keras

from lockstep.features.schema.signature import Signature
from training.batches.training_set import TrainingSet
from training.comm.base import Communicator
from training.config import TrainConfig
from training.control.context import RankContext
from training.exchange.same_run import compare_runs, processor, versions
from training.models.on_disk import export
from training.plan.mixture import Plan
from training.results.audit import sample_hex
from training.run.paths import staged_model
from training.steps.distribute_checks import settings_of
from training.steps.model_state import model_identity, weights_digest


def compare_ranks(
    communicator: Communicator,
    data: TrainingSet,
    plan: Plan,
    model: keras.Model,
    signature: Signature,
    step: int,
) -> None:
    """Raise ConfigError, on every rank alike, unless all ranks run the same on the same."""
    compare_runs(
        communicator,
        {
            **versions(),
            "processor": processor(),
            "dataset": data.manifest.digest,
            "plan": plan.identity(),
            "model": model_identity(model, signature),
            "optimizer": settings_of(model.optimizer),
            "weights": weights_digest(model),
            "step": step,
        },
    )


def export_model(
    context: RankContext, config: TrainConfig, data: TrainingSet, model: keras.Model, signature: Signature, staging: str
) -> None:
    """Upload the final model and have the driver publish it; rank 0 alone."""
    files: list[dict[str, Any]] = export(model, staged_model(staging), config.datasets[0], data.manifest, signature)
    context.control.request("model", config.stall_limit_s, files=files)


def left_over_ids(data: TrainingSet, plan: Plan, step: int) -> list[str]:
    """The samples, in hex, that the epochs up to `step` have left over; none where the last one was cut short."""
    epochs = plan.epoch_of_step(step - 1) + 1
    if step != plan.first_step(epochs):
        return []
    return [sample_hex(sample) for _, sample in data.left_over(plan, epochs)]
