"""Scores of a baseline's predictions next to those of a run's model: computed, printed, and stored in the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.documents import canonical_bytes, seal, sha256_hex, unseal_as
from lockstep.storage.errors import NotFoundError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import basename, join
from training.control.protocol import json_safe
from training.run.paths import RunPaths
from training.scoring.scores import (
    OutputForm,
    RowMetric,
    output_columns,
    sorted_rows,
    with_row_metrics,
)  # fmt: skip

KIND, FORMAT_VERSION = "baseline", 1
_KERAS_AUC = re.compile(r"auc(_\d+)?")  # the names that Keras gives to an AUC


def scores_of(
    rows: NDArray[np.float64], classes: int | None, *, probabilities: bool = True, kept: Sequence[float] | None = None
) -> dict[str, Any]:
    """Exact {metrics, intervals, class_counts} of predictions, computed as those of a model are.

    `rows` (n, 1 + outputs): the label, then a number (`classes` is None), the score of yes (two classes; if it is no
    `probability`, 0 separates yes from no), or the probability of each class. `kept` is the share of each class that
    training kept.
    """
    labels, outputs = rows[:, 0], rows[:, 1:]
    of_training = None if kept is None else tuple(kept)
    form = OutputForm(logits=False, width=outputs.shape[1], kept=of_training, numbers=classes is None)
    columns = output_columns(labels, outputs, form)
    assert columns is not None
    table = sorted_rows(np.concatenate([labels[:, None], np.ones((len(rows), 1)), columns], axis=1))
    yes_or_no = form.binary and classes is not None
    asked = [RowMetric("accuracy", "accuracy", threshold=0.5 if probabilities else 0.0)] if yes_or_no else []
    number = None if classes == 2 else classes
    found = with_row_metrics({"metrics": {}, "baseline": None}, table, asked, form, number)
    parts = {name: found[name] for name in ("metrics", "intervals", "class_counts")}
    if not probabilities:
        for name in ("log_loss", "corrected_log_loss"):
            parts["metrics"].pop(name, None), parts["intervals"].pop(name, None)
    return dict(json_safe(parts))


def store(run: str, baseline: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Store a baseline's result with that of the run's model on the same rows; returns the URL.

    `model` is a result of training.results.evaluate. The name follows from what was computed: the same baseline again
    replaces its file.
    """
    fs, scores = filesystem(run), ("metrics", "intervals", "class_counts")
    identity = sha256_hex(canonical_bytes({name: baseline[name] for name in baseline if name not in scores}))[:12]
    url = join(RunPaths(run).baselines, f"{baseline['kind']}-{identity}.json")
    shown = {name: model[name] for name in ("samples", "metrics", "intervals")}
    document = {"format_version": FORMAT_VERSION, "kind": KIND, "baseline": dict(baseline)}
    fs.mkdirs(RunPaths(run).baselines)
    write_file(fs, url, seal(document | {"model": shown | {"name": basename(model["model"])}}), exclusive=False)
    return url


def stored(fs: FileSystem, paths: RunPaths) -> list[dict[str, Any]]:
    """The documents of `store` {baseline, model} by name. Raises DataError or CorruptionError for a damaged one."""
    try:
        urls = sorted(entry.url for entry in fs.list(paths.baselines) if entry.name.endswith(".json"))
    except NotFoundError:
        return []
    return [unseal_as(KIND, fs.read_bytes(url), url) for url in urls]


def tables(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For a report: a titled table for each split, with rows of the run's model and of each baseline."""
    found: dict[str, dict[str, str]] = {}
    for document in documents:
        baseline, model = document["baseline"], document["model"]
        title = f"Baselines on {baseline['split']} of {basename(baseline['dataset'])}, with 95 % intervals"
        rows = found.setdefault(title, {})
        rows[f"model of this run ({model['name']})"] = _line(named_alike(model, baseline), baseline["metrics"])
        settings = ", ".join(baseline["settings"])
        rows[baseline["kind"] + (f" ({settings})" if settings else "")] = _line(baseline, baseline["metrics"])
    return [(title, list(rows.items())) for title, rows in found.items()]


def named_alike(model: Mapping[str, Any], baseline: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's result with its AUC under the baseline's name, since a model may call it `auc`."""
    aucs = [name for name in model["metrics"] if _KERAS_AUC.fullmatch(name)]
    if "roc_auc" not in baseline["metrics"] or "roc_auc" in model["metrics"] or len(aucs) != 1:
        return model
    parts = {part: {"roc_auc": model[part].get(aucs[0])} | model[part] for part in ("metrics", "intervals")}
    return {**model, **parts}


def text(baseline: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> str:
    """A small table of a result, next to that of a run's model if it is given."""
    size = f", {baseline['features']} columns" if baseline["features"] else ""
    head = f"{baseline['split']} of {basename(baseline['dataset'])}: {baseline['samples']} samples; "
    head += f"{baseline['kind']} fitted on {baseline['train_samples']} of {baseline['train_split']}{size}"
    results = [baseline] if model is None else [baseline, named_alike(model, baseline)]
    table = [["metric", *(cell for name in (baseline["kind"], "this run's model") for cell in (name, "95 % interval"))]]
    for name in sorted(baseline["metrics"]):
        table.append([name, *(cell for result in results for cell in _cells(result, name))])
    widths = [max(map(len, column)) for column in zip(*table, strict=False)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in table]
    return "\n".join([head, *lines])


def _cells(result: Mapping[str, Any], name: str) -> tuple[str, str]:
    value, interval = result["metrics"].get(name), result["intervals"].get(name)
    shown = "-" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)
    return shown, "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def _line(result: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    cells = {name: _cells(result, name) for name in sorted(names)}
    return ", ".join(f"{name} {value}" + ("" if span == "-" else f" [{span}]") for name, (value, span) in cells.items())
