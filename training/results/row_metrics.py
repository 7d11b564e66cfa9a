"""Metrics that need every row at once: exact values of what each rank's rows gave, the same at any number of ranks.

A row is its label, its weight and, for each predictor (the model, then perhaps a baseline), what the metrics need of
its prediction: the output itself where there is one a row, else the loss of the row and whether its class was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.sampled import corrected
from training.comm.base import Communicator
from training.results.scores import (
    Estimate,
    Estimates,
    Floats,
    average_precision,
    binary_log_losses,
    class_log_losses,
    means,
    roc_auc,
    sorted_rows,
    wilson,
)

Kind = Literal["roc_auc", "average_precision", "log_loss", "corrected_log_loss", "accuracy"]
BINARY: tuple[Kind, ...] = ("roc_auc", "average_precision", "log_loss", "corrected_log_loss")  # added to a model's own
CLASSES: tuple[Kind, ...] = ("accuracy", "log_loss", "corrected_log_loss")
LABEL, WEIGHT, OUTPUTS = 0, 1, 2  # columns; of OUTPUTS each predictor has one (yes or no) or three (classes)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a model's outputs are: log-odds or logarithms (`logits`) or probabilities, and how many a row (`width`, None
    where they are of another form); `kept` the share of each class that training kept, None where that is all.
    """

    logits: bool
    width: int | None = None
    kept: tuple[float, ...] | None = None

    @property
    def binary(self) -> bool:
        """Whether there is one output a row."""
        return self.width == 1

    @property
    def columns(self) -> int:
        """Columns of each predictor."""
        return 1 if self.binary else 3


@dataclass(frozen=True, slots=True)
class RowMetric:
    """A metric under its name in the results; `weighted` by the rows' weights, else every row counts once.

    `threshold` is that of a yes-or-no accuracy, on the model's outputs as they come.
    """

    name: str
    kind: Kind
    weighted: bool = False
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of each predictor, and by how much the first is above the second (None of one predictor)."""

    kind: Kind
    estimates: tuple[Estimate, ...]
    difference: Estimate | None


def output_columns(labels: NDArray[Any], outputs: NDArray[Any], form: OutputForm) -> Floats | None:
    """One predictor's columns of a batch: the outputs (n, 1) or, of classes, (n, 3): log loss, corrected log loss, and
    1 where the class was found. None of outputs that are no (n,), (n, 1) or (n, classes).

    `labels` (n,), numbers of classes or one-hot (n, classes).
    """
    if outputs.size == len(outputs):
        return outputs.reshape(-1, 1).astype(np.float64)
    classes = labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(-1)
    if outputs.ndim != 2 or len(classes) != len(outputs):
        return None
    numbers = classes.astype(np.int64)
    losses = without_sampling = class_log_losses(numbers, outputs, logits=form.logits)
    if form.kept is not None and not np.isinf(losses).any():
        shares = _softmax(outputs) if form.logits else outputs
        without_sampling = class_log_losses(numbers, corrected(shares, form.kept), logits=False)
    return np.stack([losses, without_sampling, outputs.argmax(axis=1) == numbers], axis=1)


def gathered_on_first(rows: Floats, communicator: Communicator) -> Floats:
    """All ranks' rows (n, columns), sorted, on rank 0; on others none. A collective.

    Memory on rank 0: some 16 bytes a value while they are sorted.
    """
    sizes = communicator.all_gather(np.array([len(rows)], np.int64))[:, 0]
    flat = np.ascontiguousarray(rows).reshape(-1)  # (n * columns,)
    if communicator.rank:
        if flat.size:
            communicator.send(flat, 0)
        return rows[:0]
    parts = [flat]
    for rank in range(1, communicator.num_ranks):
        parts.append(np.empty(int(sizes[rank]) * rows.shape[1]))
        if parts[-1].size:
            communicator.recv(parts[-1], rank)
    return sorted_rows(np.concatenate(parts).reshape(-1, rows.shape[1]))  # (n * columns,) -> (n, columns)


def class_counts(labels: Floats, classes: int | None) -> list[int] | None:
    """Rows of each class, without a number of classes those of 0 and 1; None where labels are others, or none."""
    if not len(labels) or (classes is None and not np.isin(labels, (0.0, 1.0)).all()):
        return None
    return [int(count) for count in np.bincount(labels.astype(np.int64), minlength=classes or 2)]


def measure(rows: Floats, asked: Sequence[RowMetric], form: OutputForm) -> dict[str, Measured]:
    """By name the metrics `asked` and those of BINARY or CLASSES not among them; rows as of `gathered_on_first`.

    Nothing of labels that are numbers, no log loss of outputs that are no probabilities, and a corrected one only where
    training has not kept all.
    """
    labels, weights = rows[:, LABEL], rows[:, WEIGHT]
    if form.width is None or (form.binary and class_counts(labels, None) is None):
        return {}
    ones, each = np.ones(len(rows)), form.columns
    outputs = [np.ascontiguousarray(rows[:, OUTPUTS + i :: each].T) for i in range(each)]  # (predictors, n) each
    there = {(metric.kind, metric.weighted) for metric in asked}
    names = {metric.name for metric in asked} | ({"corrected_log_loss"} if form.kept is None else set())
    standard = BINARY if form.binary else CLASSES
    added = [RowMetric(kind, kind) for kind in standard if (kind, False) not in there and kind not in names]
    compute: Callable[..., Estimates | None] = _binary if form.binary else _of_classes
    found = {}
    for metric in [*asked, *added]:
        counted = weights if metric.weighted else ones
        estimates = compute(metric, labels, outputs, counted, form)
        if estimates is not None:
            found[metric.name] = _measured(metric, estimates, counted)
    return found


def with_row_metrics(
    result: dict[str, Any], rows: Floats, asked: Sequence[RowMetric], form: OutputForm, classes: int | None
) -> dict[str, Any]:
    """A result {metrics, baseline, ...} with exact metrics, and intervals, class_counts, difference and compared_by.

    `classes` are those of the signature.
    """
    baseline = result["baseline"]
    found = measure(rows, asked, form)
    result = {**result, **_parts(found, 0, result["metrics"])}
    result["class_counts"] = class_counts(rows[:, LABEL], classes)
    result["difference"], result["compared_by"] = {}, None
    if baseline is not None:
        result["baseline"] = {**baseline, **_parts(found, 1, baseline["metrics"])}
        differences = {name: one.difference for name, one in found.items() if one.difference is not None}
        result["difference"] = {
            name: {"value": one.value, "interval": one.interval} for name, one in differences.items()
        }
        decisive = "roc_auc" if form.binary else "accuracy"
        result["compared_by"] = next((name for name, one in found.items() if one.kind == decisive), None)
    return result


def _parts(found: dict[str, Measured], predictor: int, metrics: dict[str, Any]) -> dict[str, Any]:
    estimates = {name: one.estimates[predictor] for name, one in found.items()}
    return {
        "metrics": metrics | {name: one.value for name, one in estimates.items()},
        "intervals": {name: one.interval for name, one in estimates.items() if one.interval is not None},
    }


def _binary(
    metric: RowMetric, labels: Floats, outputs: list[Floats], weights: Floats, form: OutputForm
) -> Estimates | None:
    scores = outputs[0]
    if metric.kind == "roc_auc":
        return roc_auc(labels, scores, weights)
    if metric.kind == "average_precision":
        return average_precision(labels, scores, weights)
    if metric.kind == "accuracy":
        right = ((scores > metric.threshold) == (labels == 1)).astype(np.float64)
        return means(right, weights)
    losses = binary_log_losses(labels, scores, logits=form.logits)
    if losses is not None and metric.kind == "corrected_log_loss" and form.kept is not None:
        probabilities = 1 / (1 + np.exp(-scores)) if form.logits else scores
        without_sampling = np.stack([corrected(row, form.kept) for row in probabilities])
        losses = binary_log_losses(labels, without_sampling, logits=False)
    return None if losses is None else means(losses, weights)


def _of_classes(
    metric: RowMetric, labels: Floats, outputs: list[Floats], weights: Floats, form: OutputForm
) -> Estimates | None:
    losses, without_sampling, right = outputs
    if metric.kind == "accuracy":
        return means(right, weights)
    losses = without_sampling if metric.kind == "corrected_log_loss" else losses
    return None if np.isinf(losses).any() else means(losses, weights)


def _softmax(logarithms: NDArray[Any]) -> Floats:
    raised = np.exp(logarithms.astype(np.float64) - logarithms.max(axis=1, keepdims=True))
    shares: Floats = raised / raised.sum(axis=1, keepdims=True)
    return shares


def _measured(metric: RowMetric, found: Estimates, weights: Floats) -> Measured:
    values, variances = found.values.tolist(), np.diagonal(found.covariance).tolist()
    if metric.kind == "accuracy":
        estimates = tuple(wilson(value, weights) for value in values)
    else:
        high = 1.0 if metric.kind in ("roc_auc", "average_precision") else math.inf
        pairs = zip(values, variances, strict=True)
        estimates = tuple(Estimate.normal(value, variance, 0.0, high) for value, variance in pairs)
    return Measured(metric.kind, estimates, found.difference if len(estimates) > 1 else None)
