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
from lockstep.training.control.protocol import json_safe
from lockstep.training.results.pages import estimate
from lockstep.training.rules import is_error
from lockstep.training.run.paths import RunPaths
from lockstep.training.scoring.scores import (
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

    `model` is a result of lockstep.training.results.evaluate. The name follows from what was computed: the same
    baseline again replaces its file.
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


def tables(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[list[object]]]]:
    """Make the tables of a report: a titled table for each split, a metric by row; the run's model and each baseline
    are columns.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        baseline = document["baseline"]
        title = f"Baselines on {baseline['split']} of {basename(baseline['dataset'])}, with 95 % intervals"
        found.setdefault(title, []).append(document)
    return [(title, _table(of_split)) for title, of_split in found.items()]


def _table(documents: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    first = documents[0]
    model = named_alike(first["model"], first["baseline"])
    names = sorted({name for document in documents for name in document["baseline"]["metrics"]})
    rows: list[list[object]] = [["metric", f"model of this run ({model['name']})", *map(called, documents)]]
    results = [model, *(document["baseline"] for document in documents)]
    return rows + [[name, *(estimate(*_cells(result, name)) for result in results)] for name in names]


def called(document: Mapping[str, Any]) -> str:
    """What a page calls a stored baseline: `gbt (maxDepth=2)`."""
    settings = ", ".join(document["baseline"]["settings"])
    return str(document["baseline"]["kind"]) + (f" ({settings})" if settings else "")


def on_rows_of(documents: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The stored baselines that were scored on the rows of this evaluation."""
    names = ("dataset", "split", "samples")
    wanted = [evaluation.get(name) for name in names]
    return [document for document in documents if [document["baseline"].get(name) for name in names] == wanted]


def column_of(document: Mapping[str, Any], names: Sequence[str]) -> list[object]:
    """The cells of a stored baseline below `names`, the metrics of a model that may call its AUC otherwise."""
    baseline = document["baseline"]
    return [estimate(*_cells(baseline, _own_name(baseline, name))) for name in names]


def deciding_metric(metrics: Mapping[str, Any]) -> str | None:
    """The metric by which predictors are compared where none was named; None if there is none of these."""
    wanted = ("roc_auc", "auc", "accuracy", "root_mean_squared_error", "mean_absolute_error")
    return next((name for name in wanted if isinstance(metrics.get(name), int | float)), None)


def strongest_words(
    model: Mapping[str, Any], own: Mapping[str, Any] | None, documents: Sequence[Mapping[str, Any]], metric: str
) -> list[str]:
    """Which baseline is best by `metric`, its own ({name, metrics, intervals}) or a stored one, next to the model.

    Nothing without a stored one whose metric is a number: the evaluation compares the model with its own baseline.
    """
    found = [] if own is None else [(str(own["name"]), own, metric)]
    found += [(called(one), one["baseline"], _own_name(one["baseline"], metric)) for one in documents]
    found = [one for one in found if isinstance(one[1]["metrics"].get(one[2]), int | float)]
    if not found or not documents or not isinstance(model["metrics"].get(metric), int | float):
        return []
    name, best, key = (min if is_error(metric) else max)(found, key=lambda one: one[1]["metrics"][one[2]])
    said = [_with_span(_cells(result, one)) for result, one in ((best, key), (model, metric))]
    which = f"the strongest of {len(found)} baselines" if len(found) > 1 else "the baseline"
    words = f"{which}, {name}, has {metric} {said[0]}, the model {said[1]}"
    spans = best.get("intervals", {}).get(key), model["intervals"].get(metric)
    if spans[0] is None or spans[1] is None:
        return [words]
    (low, high), (model_low, model_high) = spans
    if model_low <= high and low <= model_high:
        return [f"{words}: the intervals overlap, so they do not say which is better"]
    better = "the model" if (model_low > high) != is_error(metric) else "the baseline"
    return [f"{words}: {better} is better, the intervals are apart"]


def _own_name(baseline: Mapping[str, Any], metric: str) -> str:
    known = metric in baseline["metrics"]
    return "roc_auc" if not known and _KERAS_AUC.fullmatch(metric) else metric


def _with_span(cells: tuple[str, str]) -> str:
    value, interval = cells
    return value if interval == "-" else f"{value} ({interval})"


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
