"""Evaluates a run's model on a split: the caller's side, and the entry of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from lockstep.features.schema.sampled import sampled_of, shares_of_classes
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import parse_canonical
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute, join
from training.config import TrainConfig
from training.control.context import RankContext
from training.control.task import RankTask
from training.launch.session import Launch
from training.plan.datasets import open_mixture, open_parts, split_of
from training.rank import runtime
from training.run import notes
from training.run.paths import RunPaths
from training.run.result import find_result
from training.run.run_json import read_run
from training.run.weights_source import SCHEMA_FILE, checked_file, newest_of
from training.scoring.baseline import check_baseline
from training.scoring.scores import BATCH_ROWS

ENTRY = "training.results.evaluate:main"
SHOWN_CLASSES = 10  # in the line above the table


def evaluate(
    run: str,
    dataset: str,
    split: str,
    launch: Launch,
    *,
    num_ranks: int = 1,
    batch: int = BATCH_ROWS,
    baseline: str | None = None,
) -> dict[str, Any]:
    """Evaluate the run's model (its newest claim's, else the weights of the last checkpoint) on `split` of `dataset`.

    `baseline` is `rate:COLUMN` (the mean label for each value of a column, smoothed) or `majority` (the class shares),
    counted on the training rows and applied to the same rows as the model. Returns {run, dataset, split, model,
    samples, metrics, intervals (95 %, of metrics that have one), class_counts (None if labels are not classes),
    baseline: None or {name, metrics, intervals, class_counts}, difference (model less baseline, {metric: {value,
    interval}}), compared_by (the metric that decides, None without a baseline)}. Prints notes on doubtful numbers to
    standard error. Raises ConfigError and NotFoundError, where possible before any rank is started.
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
    document = read_run(fs, paths)
    config = TrainConfig.from_json(document["config"])
    manifest = load_dataset(dataset)
    split_of(manifest, split)
    if baseline is not None:
        check_baseline(baseline, Schema.from_json(manifest.schema))
        _check_trained_on(config, document["dataset_digest"], baseline)
    model, checkpoint = newest_of(run)
    kept = _kept(model, manifest, document["dataset_digest"])
    payload = {
        "config": config.to_json(),
        "dataset": dataset,
        "split": split,
        "batch": batch,
        "baseline": baseline,
        "kept": kept,
        "model": model,
        "checkpoint": checkpoint,
    }
    task = RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=config.tls == "on")  # as the run was trained
    found = launch(task, num_ranks)[0]
    result = {"run": run, "dataset": dataset, "split": split, "model": model or checkpoint, **found}
    notes.show(_doubts(result, find_result(fs, paths), kept))
    return result


def _kept(model: str | None, evaluated: DatasetManifest, digest: str) -> tuple[float, ...] | None:
    """The share of each class that --sample kept for training: from the exported model, else from the evaluated dataset
    if its digest is the run's. None if all rows were kept, or if a whole class was left out.
    """
    schema = Schema.from_json(evaluated.schema)
    if model is not None:
        file = join(model, SCHEMA_FILE)
        sampled = Schema.from_json(parse_canonical(checked_file(model, SCHEMA_FILE), file=file)).sampled
    else:
        sampled = sampled_of(evaluated) if evaluated.digest == digest else None
    return shares_of_classes(sampled, schema.label)


def _check_trained_on(config: TrainConfig, digest: str, baseline: str) -> None:
    """Raise ConfigError if the run's datasets have changed, or lack what `baseline` needs."""
    trained_on = (open_parts if config.mix is None else open_mixture)(config.datasets, config.split)[1]
    if trained_on.digest != digest:
        raise ConfigError(
            f"the baseline {baseline} cannot be counted on the run's training rows",
            got=f"datasets {', '.join(config.datasets)} of digest {trained_on.digest}",
            allowed=f"digest {digest}",
            next_step="Put the run's datasets back in their places, or leave --baseline out.",
        )
    check_baseline(baseline, Schema.from_json(trained_on.schema))


def _doubts(result: Mapping[str, Any], trained: Mapping[str, Any] | None, kept: Sequence[float] | None) -> list[str]:
    baseline, split = result["baseline"], result["split"]
    trained_on = baseline["class_counts"] if baseline else (trained or {}).get("class_counts")
    if trained_on and kept:  # the counts before --sample
        trained_on = [round(rows / share) for rows, share in zip(trained_on, kept, strict=True)]
    return [
        *notes.of_classes(result["class_counts"], f"split `{split}`"),
        *notes.of_classes(trained_on, "what the run was trained on"),
        *notes.of_base_rates(trained_on, result["class_counts"], split),
        *notes.of_metrics(result["metrics"], f"the metrics of split `{split}`"),
        *notes.of_baseline(result),
    ]


def summary(result: Mapping[str, Any]) -> str:
    """A small table of a result."""
    baseline, counts = result["baseline"], result["class_counts"]
    head = f"{result['split']} of {PurePosixPath(result['dataset']).name}: {result['samples']} samples"
    if counts is not None:
        classes = ", ".join(f"{rows} of {number}" for number, rows in enumerate(counts[:SHOWN_CLASSES]))
        head += f", {classes}" + (", ..." if len(counts) > SHOWN_CLASSES else "")
    table = [["metric", "model", "95 % interval"]]
    if baseline:
        table[0] += [baseline["name"], "difference", "95 % interval"]
    for name, value in sorted(result["metrics"].items()):
        row = [name, number(value), span(result["intervals"].get(name))]
        if baseline:
            difference = result["difference"].get(name, {"value": None, "interval": None})
            row += [number(baseline["metrics"].get(name)), number(difference["value"]), span(difference["interval"])]
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([head, *lines])


def main(context: RankContext) -> dict[str, Any]:
    """Evaluate this rank's share; rank 0 returns a result of `evaluate` from `samples` on, other ranks {}."""
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed)
    from training.results.evaluate_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context, config)


def number(value: Any) -> str:
    """A metric's value in a table; - if there is none."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


def span(interval: Sequence[float] | None) -> str:
    """An interval in a table; - if there is none."""
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
