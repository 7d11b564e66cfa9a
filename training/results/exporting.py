"""A checkpoint's weights in the model of its run, written as a run's end writes it: one process, no other ranks."""

from __future__ import annotations

from typing import Any

from training.batches.augmenting import labels_of
from training.config import TrainConfig
from training.control.context import RankContext
from training.driver.precheck import open_dataset
from training.models.on_disk import export
from training.models.trained_model import load_checkpoint


def run(context: RankContext, config: TrainConfig) -> dict[str, Any]:
    """Write the payload's {checkpoint} into its {directory}; returns {files}."""
    manifest, encoder = open_dataset(config)
    signature = labels_of(config, encoder.signature)
    model = load_checkpoint(context.payload["checkpoint"], config, manifest, signature)
    model.optimizer.build(model.trainable_variables)  # Keras warns when it loads one that was saved unbuilt
    return {"files": export(model, context.payload["directory"], config.datasets[0], manifest, signature)}
