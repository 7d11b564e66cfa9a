"""Computes exact metrics of all rows of a split, and their 95 % intervals. NumPy only.

A row is a label, a weight and one prediction of each of k predictors (the model, and a baseline next to it). AUC is the
share of pairs of a yes and a no that are ranked correctly, ties counting half: by ranks, not by thresholds. Results
depend only on the rows, not on their order: `sorted_rows` sorts them first, and every sum follows that order.

Intervals: AUC and differences of AUCs by DeLong, DeLong and Clarke-Pearson (Biometrics 44, 1988), with placements by
midranks (Sun and Xu, IEEE Signal Processing Letters 21, 2014); accuracy by Wilson's score interval (JASA 22, 1927);
means of rows' losses, and differences of means, by the normal approximation, paired. With weights each variance is the
linearised one, sum of (w * deviation)^2 / (sum of w)^2, which is the plain one where all weights are 1, and Wilson's
interval takes Kish's effective number of rows, (sum of w)^2 / sum of w^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.sampled import corrected
from training.comm.base import Communicator

BATCH_ROWS = 512  # scored at a time
Floats = NDArray[np.float64]
Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
PROBABILITY_STEP = float(np.finfo(np.float32).eps)  # log losses clip probabilities this far from 0 and 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric's value and its 95 % interval; None if the rows are too few or too alike for one."""

    value: float
    interval: tuple[float, float] | None = None

    @classmethod
    def normal(cls, value: float, variance: float, low: float = -math.inf, high: float = math.inf) -> Self:
        """value +- 1.96 standard errors, within low..high; without an interval if the variance is not finite."""
        if not math.isfinite(variance):
            return cls(value)
        margin = Z95 * math.sqrt(max(float(variance), 0.0))
        return cls(value, (max(low, value - margin), min(high, value + margin)))


@dataclass(frozen=True, slots=True)
class Estimates:
    """One metric of k predictors on the same rows: values (k,) and the covariance (k, k) of their errors."""

    values: Floats
    covariance: Floats

    def difference(self, of: int, less: int) -> Estimate:
        """One predictor's value less another's, paired."""
        variance = self.covariance[of, of] + self.covariance[less, less] - 2 * self.covariance[of, less]
        return Estimate.normal(float(self.values[of] - self.values[less]), float(variance))


def sorted_rows(rows: Floats, measured: int | None = None) -> Floats:
    """Rows (n, columns) sorted by their values, the last column first: the same for any order of the input.

    Only rows that are equal in the first `measured` columns (by default all) are ordered by the other ones, so that
    metrics of these columns do not depend on the others.
    """
    columns = rows.T
    return rows[np.lexsort([*columns[measured:], *columns[:measured]] if measured else columns)] if len(rows) else rows


def roc_auc(labels: Floats, scores: Floats, weights: Floats) -> Estimates:
    """Area under the ROC curve: labels (n,) of 0 and 1, scores (k, n), weights (n,).

    NaN if a class is missing or a score of this predictor is NaN; no covariance below two rows of each class.
    """
    yes, no = (labels == 1) & (weights > 0), (labels == 0) & (weights > 0)
    yes_weights, no_weights = weights[yes], weights[no]
    total = float(yes_weights.sum()) * float(no_weights.sum())
    if not total:
        return _unknown(len(scores))
    of_yes, of_no, values = [], [], []
    for row in scores:
        # Twice the weight of the other class that is below (above) each row, ties counting half: whole numbers stay
        # whole.
        below = _weight_below(row[yes], row[no], no_weights)
        above = 2 * float(yes_weights.sum()) - _weight_below(row[no], row[yes], yes_weights)
        values.append(math.nan if np.isnan(row).any() else float((yes_weights * below).sum()) / (2 * total))
        of_yes.append(below / (2 * no_weights.sum()))
        of_no.append(above / (2 * yes_weights.sum()))
    found = np.array(values)
    covariance = _covariance_of_means(np.array(of_yes), yes_weights, found)
    return Estimates(found, covariance + _covariance_of_means(np.array(of_no), no_weights, found))


def average_precision(labels: Floats, scores: Floats, weights: Floats) -> Estimates:
    """Area under the precision-recall curve as the mean precision at each rise of recall, without interpolation.

    Shapes as in `roc_auc`. NaN if there is no yes; no covariance.
    """
    values = []
    for row in scores:
        order = np.argsort(-row, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(row[order])), len(row) - 1)  # the last row of each distinct score
        yes = np.cumsum((weights * (labels == 1))[order])[ends] if len(row) else np.zeros(0)
        all_ = np.cumsum(weights[order])[ends] if len(row) else np.zeros(0)
        if not len(yes) or not yes[-1] or np.isnan(row).any():
            values.append(math.nan)
            continue
        precision = np.divide(yes, all_, out=np.zeros_like(yes), where=all_ > 0)
        values.append(float((np.diff(yes, prepend=0.0) * precision).sum() / yes[-1]))
    return Estimates(np.array(values), np.full((len(values), len(values)), math.nan))


def means(quantities: Floats, weights: Floats) -> Estimates:
    """Weighted means over rows of quantities (k, n), such as losses, or 1 for a correct row; NaN without a weight."""
    if not weights.sum():
        return _unknown(len(quantities))
    kept = weights > 0
    quantities, weights = quantities[:, kept], weights[kept]
    values = (quantities * weights).sum(axis=1) / weights.sum()
    return Estimates(values, _covariance_of_means(quantities, weights, values))


def wilson(share: float, weights: Floats) -> Estimate:
    """A share of rows, such as an accuracy, with Wilson's interval."""
    squares = float((weights * weights).sum())
    if not squares or math.isnan(share):
        return Estimate(share)
    rows = float(weights.sum()) ** 2 / squares
    middle = (share + Z95**2 / (2 * rows)) / (1 + Z95**2 / rows)
    margin = Z95 / (1 + Z95**2 / rows) * math.sqrt(share * (1 - share) / rows + Z95**2 / (4 * rows**2))
    return Estimate(share, (max(0.0, middle - margin), min(1.0, middle + margin)))


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


def _weight_below(values: Floats, others: Floats, weights: Floats) -> Floats:
    """Twice the weight of `others` (m,) below each of `values` (n,), those equal to it counting half."""
    order = np.argsort(others, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    ranked = others[order]
    return sums[np.searchsorted(ranked, values, "left")] + sums[np.searchsorted(ranked, values, "right")]


def _covariance_of_means(quantities: Floats, weights: Floats, values: Floats) -> Floats:
    """Covariance (k, k) of the weighted means `values` (k,) of quantities (k, n), each of positive weight."""
    rows = quantities.shape[1]
    if rows < 2:
        return np.full((len(values), len(values)), math.nan)
    deviations = (quantities - values[:, None]) * weights
    covariance: Floats = np.array([[(one * other).sum() for other in deviations] for one in deviations])
    return covariance / weights.sum() ** 2 * (rows / (rows - 1))


def _unknown(predictors: int) -> Estimates:
    return Estimates(np.full(predictors, math.nan), np.full((predictors, predictors), math.nan))


Kind = Literal["roc_auc", "average_precision", "log_loss", "corrected_log_loss", "accuracy"]
BINARY: tuple[Kind, ...] = ("roc_auc", "average_precision", "log_loss", "corrected_log_loss")  # added to a model's own
CLASSES: tuple[Kind, ...] = ("accuracy", "log_loss", "corrected_log_loss")
LABEL, WEIGHT, OUTPUTS = 0, 1, 2  # columns; of OUTPUTS each predictor has one (yes or no) or three (classes)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form of a model's outputs: log-odds or logarithms (`logits`) or probabilities, and their number a row
    (`width`, None for another form); `kept` is the share of each class that training kept, None for all.
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
        """Columns for each predictor."""
        return 1 if self.binary else 3


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


def measure(rows: Floats, asked: Sequence[RowMetric], form: OutputForm) -> dict[str, Measured]:
    """By name, the metrics `asked` and those of BINARY or CLASSES that are not among them; rows from
    `gathered_on_first`.

    Empty for labels that are numbers; no log loss for outputs that are not probabilities; a corrected one only if
    training has not kept all rows.
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
        result["difference"], result["compared_by"] = _difference(found, 0, 1), _decisive(found, form)
    return result


def compared(rows: Floats, names: Sequence[str], asked: Sequence[RowMetric], form: OutputForm) -> list[dict[str, Any]]:
    """Differences {of, less, difference: {metric: {value, interval}}} of predictors on the same rows, paired: of
    names[0] less the best other one by AUC or accuracy, then of each two others. Empty for labels that are numbers.

    `rows` are the columns of `measure`, with a predictor for each of `names`.
    """
    found = measure(rows, asked, form)
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
    return next((name for name, one in found.items() if one.kind == kind), None)


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
    return Measured(metric.kind, estimates, found)
