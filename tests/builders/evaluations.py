"""Evaluations, predictions and publications with the options of a request as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lockstep.storage.urls import several
from lockstep.training.launch.session import Launch
from lockstep.training.results import better_model
from lockstep.training.results import evaluate as evaluation
from lockstep.training.results import follow as following
from lockstep.training.results import predict as prediction
from lockstep.training.results.evaluate import EvaluateRequest

Runs = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
TIMES = ("start_delay_s", "throttle_s", "look_s", "idle_s", "show")


def evaluate(runs: Runs, dataset: str, split: str, launch: Launch, **options: Any) -> dict[str, Any]:
    """lockstep.training.results.evaluate.evaluate."""
    return evaluation.evaluate(EvaluateRequest(several(runs), dataset, split, **options), launch)


def follow(run: str, dataset: str, split: str, launch: Launch, **options: Any) -> list[dict[str, Any]]:
    """lockstep.training.results.follow.follow."""
    times = {name: options.pop(name) for name in TIMES if name in options}
    return following.follow(EvaluateRequest((run,), dataset, split, **options), launch, **times)


def predict(runs: Runs, dataset: str, split: str, output: str, launch: Launch, **options: Any) -> prediction.Predicted:
    """lockstep.training.results.predict.predict."""
    request = prediction.PredictRequest(several(runs), dataset, split, output, **options)
    return prediction.predict(request, launch)


def publish(
    run: str, models: str, dataset: str, split: str, metric: str, launch: Launch, **options: Any
) -> dict[str, Any]:
    """lockstep.training.results.better_model.publish_if_better."""
    return better_model.publish_if_better(EvaluateRequest((run,), dataset, split), models, metric, launch, **options)
