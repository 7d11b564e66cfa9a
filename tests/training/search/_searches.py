"""Searches without ranks: trials whose metrics are a function of their parameters, in milliseconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.run.result import RunResult
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.space import space_of
from lockstep.training.search.tune import run_trials

SPACE = {"learning_rate": {"low": 1e-3, "high": 1.0, "log": True}, "global_batch": {"choices": [8, 16]}}


def search(root: object, space: dict[str, Any] = SPACE, **options: Any) -> SearchConfig:
    """A search in `root`, by default of 12 trials of 4 epochs for the least loss."""
    base = TrainConfig(
        datasets=("data",),
        run=str(root),
        model="logistic",
        num_ranks=1,
        global_batch=8,
        epochs=options.pop("epochs", 4),
        seed=options.pop("seed", 0),
        validate=options.pop("validate", None),
        launcher="local",
    )
    given = {"metric": "loss:min", "trials": 12, **options}
    return SearchConfig(base=base, space=space_of(space, "the test"), **given)


def loss_of(parameters: dict[str, Any], epochs: int) -> float:
    """Best near a learning rate of 0.1; falls with each epoch."""
    return (math.log10(parameters["learning_rate"]) + 1) ** 2 + 1 / epochs


def trainer(config: TrainConfig, hooks: Hooks) -> RunResult:
    """A trial that ends at once."""
    losses = [loss_of(config.options(), epochs) for epochs in range(1, config.data.epochs + 1)]
    for epoch, loss in enumerate(losses):
        hooks.on_epoch({"kind": "epoch", "step": epoch + 1, "epoch": epoch, "metrics": {"loss": loss}})
        if (error := hooks.ended()) is not None:
            raise error
    return result_of(config, {"loss": losses[-1]})


def result_of(config: TrainConfig, metrics: dict[str, Any]) -> RunResult:
    """The result of a trial."""
    return RunResult(
        run=config.run,
        generation=1,
        steps=1,
        epochs=config.data.epochs,
        epochs_asked=config.data.epochs,
        metrics=metrics,
        samples=1,
        seconds=1.0,
        samples_per_s=1.0,
        restarts=0,
        checkpoint=None,
        model=f"{config.run}/models/g0001",
        left_over=[],
    )


def run(config: SearchConfig, trains: Any = trainer) -> dict[str, Any]:
    """Run a search to its end; another driver's lease is watched for a moment only."""
    return run_trials(config, trains, take_over=False, hooks=Hooks(lease_watch_s=0.0))


def journal(root: Path) -> list[bytes]:
    """The journal's files, in order; a killed driver may leave a temporary one."""
    return [path.read_bytes() for path in sorted((root / "journal").glob("[0-9]*.json"))]
