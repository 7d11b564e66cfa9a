"""An entry for trials without TensorFlow: 80 ms a step, and a loss at the end of each epoch that the rate decides."""

from __future__ import annotations

import os
import time
from typing import Any

import _ranks  # type: ignore[import-not-found]  # the folder of both files is on the ranks' import path

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.driver.preflight import plan_for


def train(context: RankContext) -> dict[str, Any]:
    """`_ranks.train` with a row for each epoch: {loss: learning rate / epochs done}."""
    config = TrainConfig.from_json(context.payload["config"])
    plan = plan_for(load_dataset(config.data.datasets[0]), config)
    rate = config.step.learning_rate or 1.0
    ends = {plan.steps(epochs): epochs for epochs in range(1, config.data.epochs + 1)}

    def hurdle(step: int) -> None:
        """Called before step `step` + 1."""
        time.sleep(0.08)
        if step in ends and context.world.is_leader:
            context.control.notify("metrics", rows=[row(step)])

    def row(step: int) -> dict[str, Any]:
        metrics = {"loss": rate / ends[step]}
        return {"kind": "epoch", "step": step, "epoch": ends[step] - 1, "metrics": metrics, "seconds": 0.1}

    result: dict[str, Any] = _ranks._train(context, hurdle)
    return {**result, "metrics": {"loss": rate / config.data.epochs, "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}}
