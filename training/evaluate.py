"""Evaluation of a run's model on a split: the caller's side, and the entry of each rank."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from features.schema import Schema
from storage.errors import ConfigError
from storage.fs import absolute, filesystem
from storage.manifest import load_dataset
from storage.sealed import unseal
from storage.settings import hadoop_settings
from training import runtime
from training.baseline import check_baseline
from training.config import TrainConfig
from training.launch.context import RankContext
from training.launch.session import Launch
from training.launch.task import RankTask
from training.parts import open_parts, split_of
from training.paths import RunPaths
from training.weights_source import newest_of

ENTRY = "training.evaluate:main"


def evaluate(
    run: str,
    dataset: str,
    split: str,
    launch: Launch,
    *,
    num_ranks: int = 1,
    batch: int = 512,
    baseline: str | None = None,
) -> dict[str, Any]:
    """Evaluate the run's model (its newest claim's, else the weights of the chain's tip) on `split` of `dataset`.

    Returns {run, dataset, split, model, samples, metrics, baseline: None or {name, metrics}}. `baseline` is
    `rate:COLUMN` (the training split's mean label for each value of a column, smoothed) or `majority` (its class
    shares), on the same rows. Raises ConfigError and NotFoundError before any rank is started where they can be.
    """
    if batch < 1 or num_ranks < 1:
        raise ConfigError(
            "an evaluation needs rows and ranks",
            got=f"batch={batch}, num_ranks={num_ranks}",
            allowed="integers from 1 up",
            next_step="Correct --batch or --num-ranks.",
        )
    run, dataset = absolute(run), absolute(dataset)
    fs, paths = filesystem(run), RunPaths(run)
    config = TrainConfig.from_json(unseal(fs.read_bytes(paths.run_json), paths.run_json)["config"])
    manifest = load_dataset(dataset)
    split_of(manifest, split)
    if baseline is not None:
        check_baseline(baseline, Schema.from_json(manifest.schema))
        split_of(open_parts([dataset], config.split)[1], config.split)
    model, checkpoint = newest_of(run)
    payload = {
        "config": config.to_json(),
        "dataset": dataset,
        "split": split,
        "batch": batch,
        "baseline": baseline,
        "model": model,
        "checkpoint": checkpoint,
    }
    task = RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=config.tls == "on")  # as the run was trained
    results = launch(task, num_ranks)
    return {"run": run, "dataset": dataset, "split": split, "model": model or checkpoint, **results[0]}


def summary(result: dict[str, Any]) -> str:
    """A small table of a result."""
    baseline = result["baseline"]
    names = sorted(result["metrics"])
    head = f"{'metric':<12}{'model':>10}" + (f"{baseline['name']:>24}" if baseline else "")
    lines = [f"{result['split']} of {PurePosixPath(result['dataset']).name}: {result['samples']} samples", head]
    for name in names:
        line = f"{name:<12}{_number(result['metrics'][name]):>10}"
        if baseline:
            line += f"{_number(baseline['metrics'].get(name)):>24}"
        lines.append(line)
    return "\n".join(lines)


def main(context: RankContext) -> dict[str, Any]:
    """Evaluate this rank's share; returns {samples, metrics, baseline}, the same on every rank."""
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed)
    from training.evaluating import run  # TensorFlow is imported now that its settings are made

    return run(context, config)


def _number(value: Any) -> str:
    # A loss that is given by name alone has no baseline.
    return "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)
