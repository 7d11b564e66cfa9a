"""Cross-validation: for each fold of a dataset a run on the other folds, evaluated on the one held out.

CV/fold-0/        the run that fold-0 is held out of, an ordinary run
CV/fold-0.json    its evaluation on fold-0
CV/result.json    the metrics of all folds, with mean and standard deviation, and of all held-out rows together
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import PurePosixPath
from typing import Any

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import ConfigError, CorruptionError, NotFoundError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute, basename, join
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import preflight
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.session import Launch
from lockstep.training.results.evaluate import EvaluateRequest, aligned, evaluate, evaluate_pooled, number, span
from lockstep.training.run.weights_source import newest_of

FORMAT_VERSION = 1
RESULT = "result.json"
_FOLD = re.compile(r"fold-([0-9]+)")


def runs_of_folds(config: TrainConfig) -> dict[str, TrainConfig]:
    """The run of each fold: its configuration by the name of the fold held out. Changes nothing.

    Raises ConfigError for a dataset that has no folds, a directory with other files, and all that a single run of
    these is refused for.
    """
    refuse_validation(config)
    root = absolute(config.run)
    what, step = "the dataset of a cross-validation", "Make one with --split kfold:5, and name it alone."
    require(len(config.data.datasets) == 1, what, ", ".join(config.data.datasets), "one dataset", step)
    names = list(load_dataset(absolute(config.data.datasets[0])).splits)
    folded = len(names) > 1 and all(map(_FOLD.fullmatch, names))
    require(folded, what, f"splits {', '.join(names)}", "two folds or more: fold-0, fold-1, ...", step)
    names.sort(key=lambda name: int(name.removeprefix("fold-")))
    _refuse_strange_directory(root, names)
    runs = {
        held_out: config.but(run=join(root, held_out), split=",".join(name for name in names if name != held_out))
        for held_out in names
    }
    for run in runs.values():
        preflight(run)
    return runs


def refuse_validation(config: TrainConfig) -> None:
    """Raise ConfigError for a validation: a fold's run is trained on all data but the fold that tests it."""
    require(
        config.validation.validate is None,
        "the `validate` of a cross-validation",
        str(config.validation.validate),
        "none: a run is trained on all folds but one, and a choice by that one would flatter its evaluation",
        "Leave --validate out; --early-stop may watch a metric of the training rows.",
    )


def cross_validate(
    config: TrainConfig, launch: Launch, *, take_over: bool = False, hooks: Hooks | None = None
) -> dict[str, Any]:
    """Train a run for each fold of the dataset, one after another, and evaluate each on the fold held out.

    `config.run` is the directory of the cross-validation; `config.data.split` is ignored. The same call resumes after
    the folds that are done. Returns the content of result.json: `folds` ([{fold, run, model, samples, metrics}]),
    `metrics` ({name: {mean, std, n}}: the standard deviation over the n folds that have a number, divided by n - 1,
    None for one) and `pooled` ({samples, metrics, intervals}: each row predicted by the model that has not seen it, all
    rows together). Raises what `runs_of_folds`, `train` and `evaluate` raise.
    """
    runs = runs_of_folds(config)
    root = absolute(config.run)
    fs, found = filesystem(root), []
    for place, (fold, run) in enumerate(runs.items(), 1):
        print(f"{fold}, {place} of {len(runs)}: {run.run}, trained on all other folds", file=sys.stderr, flush=True)
        train(run, launch, take_over=take_over, hooks=hooks)
        evaluation = _evaluated(fs, join(root, f"{fold}.json"), fold, run, launch)
        kept = {name: evaluation[name] for name in ("run", "model", "samples", "metrics")}
        found.append({"fold": fold, **kept})
    pooled = _pooled(fs, join(root, RESULT), found, config, launch)
    result = {
        "format_version": FORMAT_VERSION,
        "kind": "cross_validation",
        "dataset": absolute(config.data.datasets[0]),
        "model": config.model.model,
        "folds": found,
        "metrics": over_folds([fold["metrics"] for fold in found]),
        "pooled": pooled,
    }
    write_file(fs, join(root, RESULT), seal(result), exclusive=False)
    return result


def over_folds(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation (divided by n - 1) and n of each metric, over the folds where it is a finite number."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name for each in metrics for name in each}):
        values = [each[name] for each in metrics if _is_number(each.get(name))]
        mean = statistics.mean(values) if values else None
        std = statistics.stdev(values) if len(values) > 1 else None
        found[name] = {"mean": mean, "std": std, "n": len(values)}
    return found


def summary(result: Mapping[str, Any]) -> str:
    """A table of a result: a row for each metric."""
    folds = result["folds"]
    samples = sum(fold["samples"] for fold in folds)
    head = f"{len(folds)} folds of {PurePosixPath(result['dataset']).name}, model {result['model']}: {samples} samples"
    table = [["metric", "all rows", "95 % interval", "mean", "std", *(fold["fold"] for fold in folds)]]
    pooled = result["pooled"]
    for name, over in result["metrics"].items():
        values = (number(fold["metrics"].get(name)) for fold in folds)
        together = [number(pooled["metrics"].get(name)), span(pooled["intervals"].get(name))]
        table.append([name, *together, number(over["mean"]), number(over["std"]), *values])
    return "\n".join([head, *aligned(table)])


def _evaluated(fs: FileSystem, url: str, fold: str, run: TrainConfig, launch: Launch) -> dict[str, Any]:
    """The evaluation of a finished run on its fold: the stored one, unless the run has trained longer since."""
    try:
        stored = unseal_as("evaluation", fs.read_bytes(url), url, version=FORMAT_VERSION)
    except NotFoundError:
        stored = None
    except CorruptionError as error:
        error.next_step = "Delete this file: the same call evaluates the fold again."
        raise
    model, checkpoint = newest_of(run.run)
    newest = str(model or checkpoint)
    if stored is not None and basename(stored["model"]) == basename(newest):
        return stored | {"run": run.run, "model": newest}  # all may have been moved since
    found = evaluate(EvaluateRequest((run.run,), run.data.datasets[0], fold, num_ranks=run.ranks.num_ranks), launch)
    document = {"format_version": FORMAT_VERSION, "kind": "evaluation", **found}
    write_file(fs, url, seal(document), exclusive=False)
    return document


def _pooled(
    fs: FileSystem, url: str, folds: Sequence[Mapping[str, Any]], config: TrainConfig, launch: Launch
) -> dict[str, Any]:
    """The metrics of all held-out rows together: those of the stored result at `url`, unless a model has changed."""
    try:
        stored = unseal_as("cross_validation", fs.read_bytes(url), url, version=FORMAT_VERSION)
    except NotFoundError:
        stored = {"folds": []}
    models = [[basename(fold["model"]) for fold in each] for each in (stored["folds"], folds)]
    if models[0] == models[1] and "pooled" in stored:
        return dict(stored["pooled"])
    runs = {fold["fold"]: fold["run"] for fold in folds}
    return evaluate_pooled(runs, config.data.datasets[0], launch, num_ranks=config.ranks.num_ranks)


def _refuse_strange_directory(root: str, folds: Sequence[str]) -> None:
    try:
        names = [entry.name for entry in filesystem(root).list(root)]
    except NotFoundError:
        return
    ours = {RESULT, *folds, *(f"{fold}.json" for fold in folds)}
    strange = sorted(name for name in names if name not in ours and not name.startswith("."))
    if strange:
        raise ConfigError(
            f"{root} exists and is not the cross-validation of these folds",
            got=f"a directory with {', '.join(strange[:5])}",
            allowed=f"{', '.join(folds)} and {RESULT}, an empty directory or none",
            next_step="Choose another --run.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)
