"""Computes exact metrics of all rows of a split, and their 95 % intervals. NumPy only.

A row is a label, a weight and one prediction of each of k predictors (the model, and a baseline next to it). AUC is the
share of pairs of a yes and a no that are ranked correctly, ties counting half: by ranks, not by thresholds. Results
depend only on the rows, not on their order: `sorted_rows` sorts them first, and every sum follows that order.

Intervals are those of lockstep.training.scoring.estimates. Rows of one cluster, such as those of one visitor, depend on
each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.sampled import corrected
from lockstep.training.comm.base import Communicator
from lockstep.training.scoring.estimates import (
    Estimate,
    Estimates,
    Floats,
    average_precision,
    means,
    roc_auc,
    shares,
    squared_errors,
)

BATCH_ROWS = 512  # scored at a time
PROBABILITY_STEP = float(np.finfo(np.float32).eps)  # log losses clip probabilities this far from 0 and 1
BINARY: tuple[Kind, ...] = ("roc_auc", "average_precision", "log_loss", "corrected_log_loss")  # added to a model's own
CLASSES: tuple[Kind, ...] = ("accuracy", "log_loss", "corrected_log_loss")
NUMBERS: tuple[Kind, ...] = ("mean_absolute_error", "mean_squared_error", "root_mean_squared_error", "r2")
BOTH: tuple[Kind, ...] = ("accuracy", *NUMBERS)  # of one output a row, if they are asked for
LABEL, WEIGHT, OUTPUTS = 0, 1, 2  # columns; of OUTPUTS each predictor has one (yes or no) or three (classes)


def sorted_rows(rows: Floats, measured: int | None = None) -> Floats:
    """Rows (n, columns) sorted by their values, the last column first: the same for any order of the input.

    Only rows that are equal in the first `measured` columns (by default all) are ordered by the other ones, so that
    metrics of these columns do not depend on the others.
    """
    columns = rows.T
    return rows[np.lexsort([*columns[measured:], *columns[:measured]] if measured else columns)] if len(rows) else rows


def binary_log_losses(labels: Floats, outputs: Floats, *, logits: bool) -> Floats | None:
    """Each row's -log of the probability of its label, (k, n); None if outputs (k, n) are not probabilities.

    `logits`: they are log-odds.
    """
    if logits:
        return np.logaddexp(0.0, np.where(labels == 1, -outputs, outputs))
    if ((outputs < 0) | (outputs > 1)).any():
        return None
    of_label = np.where(labels == 1, outputs, 1 - outputs)
    return -np.log(np.clip(of_label, PROBABILITY_STEP, 1 - PROBABILITY_STEP))


def class_log_losses(labels: NDArray[np.int64], outputs: NDArray[Any], *, logits: bool) -> Floats:
    """Each row's -log of the probability of its class, (n,); labels (n,), outputs (n, classes).

    Infinity for each row whose outputs are not probabilities. `logits`: they are logarithms.
    """
    values = outputs.astype(np.float64)
    at_label = np.arange(len(labels)), labels
    if logits:
        values = values - values.max(axis=1, keepdims=True)
        losses: Floats = np.log(np.exp(values).sum(axis=1)) - values[at_label]
        return losses
    strange = (values < 0).any(axis=1) | (np.abs(values.sum(axis=1) - 1) > 1e-3)
    losses = -np.log(np.clip(values[at_label], PROBABILITY_STEP, 1 - PROBABILITY_STEP))
    losses[strange] = math.inf
    return losses


Kind = Literal[
    "roc_auc", "average_precision", "log_loss", "corrected_log_loss", "accuracy",
    "mean_absolute_error", "mean_squared_error", "root_mean_squared_error", "r2",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form of a model's outputs: log-odds or logarithms (`logits`) or probabilities, and their number a row
    (`width`, None for another form); `kept` is the share of each class that training kept, `thinned` that of the split
    that is scored, each None for all. `numbers` says that labels are numbers, also where they happen to be 0 and 1.
    """

    logits: bool
    width: int | None = None
    kept: tuple[float, ...] | None = None
    thinned: tuple[float, ...] | None = None
    numbers: bool = False

    @property
    def binary(self) -> bool:
        """Whether there is one output a row."""
        return self.width == 1

    @property
    def columns(self) -> int:
        """Columns for each predictor."""
        return 1 if self.binary else 3

    def stands_for(self, labels: Floats) -> Floats:
        """How many rows each row (n,) stands for: 1, in a thinned split 1 / the share of its class that was kept."""
        if self.thinned is None:
            return np.ones(len(labels))
        return 1 / np.asarray(self.thinned)[labels.astype(np.int64)]


@dataclass(frozen=True, slots=True)
class RowMetric:
    """A metric under its name in the results; `weighted` by the rows' weights, else every row counts once.

    `threshold` is that of a yes-or-no accuracy, applied to the model's outputs.
    """

    name: str
    kind: Kind
    weighted: bool = False
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of each predictor, and how their errors go together."""

    kind: Kind
    weighted: bool
    estimates: tuple[Estimate, ...]
    together: Estimates


def output_columns(labels: NDArray[Any], outputs: NDArray[Any], form: OutputForm) -> Floats | None:
    """One predictor's columns of a batch: the outputs (n, 1) or, for classes, (n, 3): log loss, corrected log loss, and
    1 if the class was predicted. None for outputs that are not (n,), (n, 1) or (n, classes).

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


def class_shares(outputs: NDArray[Any], form: OutputForm) -> Floats | None:
    """Probabilities (n, classes) of a batch's outputs, corrected for sampled classes; None if they are none."""
    values = outputs.astype(np.float64)
    if not form.logits and ((values < 0).any() or (np.abs(values.sum(axis=1) - 1) > 1e-3).any()):
        return None
    shares = _softmax(values) if form.logits else values
    return shares if form.kept is None else corrected(shares, form.kept)


def gathered_on_first(rows: Floats, communicator: Communicator, measured: int | None = None) -> Floats:
    """All ranks' rows (n, columns), sorted as by `sorted_rows`, on rank 0; none on other ranks. A collective.

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
    table = np.concatenate(parts).reshape(-1, rows.shape[1])  # (n * columns,) -> (n, columns)
    return sorted_rows(table, measured)


def class_counts(labels: Floats, classes: int | None) -> list[int] | None:
    """Rows of each class, without a number of classes those of 0 and 1; None for other labels or no rows."""
    if not len(labels) or (classes is None and not np.isin(labels, (0.0, 1.0)).all()):
        return None
    return [int(count) for count in np.bincount(labels.astype(np.int64), minlength=classes or 2)]


def measure(
    rows: Floats, asked: Sequence[RowMetric], form: OutputForm, clusters: NDArray[Any] | None = None
) -> dict[str, Measured]:
    """Compute, by name, the metrics `asked` and those of BINARY, CLASSES or NUMBERS that are not among them. `rows` are
    from `gathered_on_first`; `clusters` is the cluster of each row (n,) if rows of one depend on each other.

    No log loss for outputs that are not probabilities. A corrected one if training or the split has not kept all rows:
    predictions are corrected for training, and a row of a sampled split counts 1 / the share of its
    class that was kept. Metrics that were not asked for count each row once.
    """
    labels, weights = rows[:, LABEL], rows[:, WEIGHT]
    if form.width is None:
        return {}
    are_numbers = form.binary and (form.numbers or class_counts(labels, None) is None)
    each = form.columns
    outputs = [np.ascontiguousarray(rows[:, OUTPUTS + i :: each].T) for i in range(each)]  # (predictors, n) each
    standard = NUMBERS if are_numbers else BINARY if form.binary else CLASSES
    of_labels = [metric for metric in asked if metric.kind in (*standard, *(BOTH if form.binary else ()))]
    there = {(metric.kind, metric.weighted) for metric in of_labels}
    names = {metric.name for metric in asked} | (set() if form.kept or form.thinned else {"corrected_log_loss"})
    added = [RowMetric(kind, kind) for kind in standard if (kind, False) not in there and kind not in names]
    found = {}
    for metric in [*of_labels, *added]:
        counted = weights if metric.weighted else np.ones(len(rows))
        if metric.kind == "corrected_log_loss":
            counted = counted * form.stands_for(labels)
        compute = _binary if form.binary else _of_classes
        estimates = compute(metric, labels, outputs, counted, form, clusters)
        if estimates is not None:
            found[metric.name] = _measured(metric, estimates)
    return found


def with_row_metrics(
    result: dict[str, Any],
    rows: Floats,
    asked: Sequence[RowMetric],
    form: OutputForm,
    classes: int | None,
    clusters: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """A result {metrics, baseline, ...} with exact metrics, and intervals, class_counts, difference and compared_by.

    `classes` are those of the signature, `clusters` (n,) as in `measure`.
    """
    baseline = result["baseline"]
    found = measure(rows, asked, form, clusters)
    result = {**result, **_parts(found, 0, result["metrics"])}
    result["class_counts"] = class_counts(rows[:, LABEL], classes)
    result["difference"], result["compared_by"] = {}, None
    if baseline is not None:
        result["baseline"] = {**baseline, **_parts(found, 1, baseline["metrics"])}
        result["difference"] = _difference(found, 0, 1)
        of_numbers = next((name for name, one in found.items() if one.kind == "r2" and form.binary), None)
        result["compared_by"] = _decisive(found, form) or of_numbers
    return result


def compared(
    rows: Floats,
    names: Sequence[str],
    asked: Sequence[RowMetric],
    form: OutputForm,
    clusters: NDArray[Any] | None = None,
) -> list[dict[str, Any]]:
    """Differences {of, less, difference: {metric: {value, interval}}} of predictors on the same rows, paired: of
    names[0] less the best other one by AUC or accuracy, then of each two others. Empty for labels that are numbers.

    `rows` are the columns of `measure`, with a predictor for each of `names`.
    """
    found = measure(rows, asked, form, clusters)
    decisive = _decisive(found, form)
    if decisive is None:
        return []
    values = [-math.inf if math.isnan(one.value) else one.value for one in found[decisive].estimates[1:]]
    pairs = [(0, 1 + values.index(max(values))), *combinations(range(1, len(names)), 2)]
    return [{"of": names[of], "less": names[less], "difference": _difference(found, of, less)} for of, less in pairs]


def _difference(found: dict[str, Measured], of: int, less: int) -> dict[str, Any]:
    differences = {name: one.together.difference(of, less) for name, one in found.items()}
    return {name: {"value": one.value, "interval": one.interval} for name, one in differences.items()}


def _decisive(found: dict[str, Measured], form: OutputForm) -> str | None:
    kind = "roc_auc" if form.binary else "accuracy"
    names = [name for name, one in found.items() if one.kind == kind]
    return next((name for name in names if not found[name].weighted), names[0] if names else None)


def _parts(found: dict[str, Measured], predictor: int, metrics: dict[str, Any]) -> dict[str, Any]:
    estimates = {name: one.estimates[predictor] for name, one in found.items()}
    return {
        "metrics": metrics | {name: one.value for name, one in estimates.items()},
        "intervals": {name: one.interval for name, one in estimates.items() if one.interval is not None},
    }


def _binary(
    metric: RowMetric,
    labels: Floats,
    outputs: list[Floats],
    weights: Floats,
    form: OutputForm,
    clusters: NDArray[Any] | None,
) -> Estimates | None:
    scores = outputs[0]
    if metric.kind == "roc_auc":
        return roc_auc(labels, scores, weights, clusters)
    if metric.kind == "average_precision":
        return average_precision(labels, scores, weights, clusters)
    if metric.kind == "accuracy":
        right = ((scores > metric.threshold) == (labels == 1)).astype(np.float64)
        return shares(right, weights, clusters)
    if metric.kind == "mean_absolute_error":
        return means(np.abs(scores - labels), weights, clusters)
    if metric.kind in NUMBERS:
        return squared_errors(labels, scores, weights, clusters)[metric.kind]
    losses = binary_log_losses(labels, scores, logits=form.logits)
    if losses is not None and metric.kind == "corrected_log_loss" and form.kept is not None:
        probabilities = 1 / (1 + np.exp(-scores)) if form.logits else scores
        without_sampling = np.stack([corrected(row, form.kept) for row in probabilities])
        losses = binary_log_losses(labels, without_sampling, logits=False)
    return None if losses is None else means(losses, weights, clusters)


def _of_classes(
    metric: RowMetric,
    labels: Floats,
    outputs: list[Floats],
    weights: Floats,
    form: OutputForm,
    clusters: NDArray[Any] | None,
) -> Estimates | None:
    losses, without_sampling, right = outputs
    if metric.kind == "accuracy":
        return shares(right, weights, clusters)
    losses = without_sampling if metric.kind == "corrected_log_loss" else losses
    return None if np.isinf(losses).any() else means(losses, weights, clusters)


def _softmax(logarithms: NDArray[Any]) -> Floats:
    raised = np.exp(logarithms.astype(np.float64) - logarithms.max(axis=1, keepdims=True))
    shares: Floats = raised / raised.sum(axis=1, keepdims=True)
    return shares


def _measured(metric: RowMetric, found: Estimates) -> Measured:
    low = -math.inf if metric.kind == "r2" else 0.0
    high = 1.0 if metric.kind in ("roc_auc", "average_precision", "accuracy", "r2") else math.inf
    each = tuple(found.one(number, low, high) for number in range(len(found.values)))
    return Measured(metric.kind, metric.weighted, each, found)
