"""Estimates of metrics from rows, with 95 % intervals that cover what they say. NumPy only.

Every metric here is a smooth function of the rows' weights, so its error is a sum over rows of their *influences*: the
derivative of the metric by a row's weight (the infinitesimal jackknife: Jaeckel, Bell Laboratories MM 72-1215-11, 1972;
for AUC it is the variance of DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988). Rows that depend on each other,
such as those of one visitor, are added before they are squared (Liang and Zeger, Biometrika 73, 1986).

* Means and their differences: Student's t, with Satterthwaite's degrees of freedom where two strata add up.
* AUC and average precision: the same on the scale of log-odds, since both end at 0 and 1. Where fewer than FEW rows of
  the rarer class are expected on the wrong side, an AUC's interval also spans Newcombe's (method 5, Statistics in
  Medicine 25, 2006), which does not need an estimated variance: there it is wider than it has to be.
* Accuracies: Wilson's score interval (JASA 22, 1927). Differences of two on the same rows: Agresti and Min (Statistics
  in Medicine 24, 2005), who add half a row to each of the four outcomes: without, the interval of a rare class has no
  width. Where two models differ in fewer than ten rows, it is wider than it has to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
FEW, FEWEST = 5.0, 1.0  # rows of the rarer class that an AUC puts on the wrong side
_GRID = np.linspace(0.0, 1.0, 20_001)[1:-1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric's value and its 95 % interval; None if the rows are too few or too alike for one."""

    value: float
    interval: tuple[float, float] | None = None

    @classmethod
    def within(cls, value: float, margin: float, low: float, high: float) -> Self:
        """Return value +- margin, cut at low and high; without an interval if the margin is not finite."""
        if not math.isfinite(margin):
            return cls(value)
        return cls(value, (max(low, value - margin), min(high, value + margin)))


@dataclass(frozen=True, slots=True)
class Part:
    """The covariance (k, k) of k predictors' errors that one stratum of rows, such as all yes, adds, and its degrees of
    freedom.
    """

    covariance: Floats
    freedom: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """One metric of k predictors on the same rows: values (k,) and the parts of their errors' covariance."""

    values: Floats
    parts: tuple[Part, ...]
    scale: Literal["plain", "log-odds"] = "plain"
    rows: tuple[float, float] | None = None
    """The rows of yes and of no that an AUC was computed from; of clusters their number."""

    @property
    def covariance(self) -> Floats:
        """The covariance (k, k) of the errors."""
        total: Floats = sum((part.covariance for part in self.parts), np.zeros((len(self.values), len(self.values))))
        return total

    def one(self, predictor: int, low: float = -math.inf, high: float = math.inf) -> Estimate:
        """One predictor's value, with an interval within low..high."""
        value = float(self.values[predictor])
        margin = self._margin(np.eye(len(self.values))[predictor])
        if self.scale == "plain":
            return Estimate.within(value, margin, low, high)
        interval = _on_log_odds(value, margin)
        if self.rows is not None and min(self.rows) >= 2 and self._wrong(value) < FEW:
            interval = _spanned(interval, newcombe(value, *self.rows))
        return Estimate(value, interval)

    def difference(self, of: int, less: int) -> Estimate:
        """One predictor's value less another's, paired; without an interval of AUCs that put fewer than FEWEST rows of
        the rarer class on the wrong side.
        """
        signs = np.eye(len(self.values))[of] - np.eye(len(self.values))[less]
        value = float(self.values[of] - self.values[less])
        if any(self._wrong(float(self.values[one])) < FEWEST for one in (of, less)):
            return Estimate(value)
        return Estimate.within(value, self._margin(signs), -math.inf, math.inf)

    def _wrong(self, value: float) -> float:
        """Rows of the rarer class that an AUC puts on the wrong side; no limit for other metrics."""
        return math.inf if self.rows is None else min(self.rows) * min(value, 1 - value)

    def _margin(self, signs: Floats) -> float:
        """Half of the interval's width, for a combination of the values."""
        found = [(float(signs @ part.covariance @ signs), part.freedom) for part in self.parts]
        total = sum(max(variance, 0.0) for variance, _ in found)
        if not found or not math.isfinite(total):
            return math.nan
        spread = sum(max(variance, 0.0) ** 2 / freedom for variance, freedom in found if freedom > 0)
        freedom = total**2 / spread if spread else math.inf
        return t95(freedom) * math.sqrt(total)


@dataclass(frozen=True, slots=True)
class Shares(Estimates):
    """Shares of rows, such as accuracies of k predictors: `only` (k, k) is the share of rows of which predictor i is
    right and predictor j wrong, `effective` the number of independent rows that says as much.
    """

    only: Floats = field(kw_only=True)
    effective: float = field(kw_only=True)
    clustered: bool = field(kw_only=True)

    def one(self, predictor: int, low: float = 0.0, high: float = 1.0) -> Estimate:
        """One predictor's share, with Wilson's interval for its own number of independent rows."""
        share = float(self.values[predictor])
        rows = self._independent(share * (1 - share), float(self.covariance[predictor, predictor]))
        return wilson(share, rows)

    def difference(self, of: int, less: int) -> Estimate:
        """One predictor's share less another's, with Agresti and Min's interval."""
        value = float(self.values[of] - self.values[less])
        one, other = float(self.only[of, less]), float(self.only[less, of])
        variance = self.covariance[of, of] + self.covariance[less, less] - 2 * self.covariance[of, less]
        rows = self._independent(one + other - (one - other) ** 2, float(variance))
        if not rows or math.isnan(value):
            return Estimate(value)
        one, other, all_ = one * rows + 0.5, other * rows + 0.5, rows + 2
        middle = (one - other) / all_
        margin = Z95 * math.sqrt((one + other) / all_ - middle**2) / math.sqrt(all_)
        return Estimate(value, (max(-1.0, min(value, middle - margin)), min(1.0, max(value, middle + margin))))

    def _independent(self, of_one_row: float, variance: float) -> float:
        """How many independent rows have this variance: the effective number unless clusters say that it is less."""
        if not self.clustered or not math.isfinite(variance) or variance <= 0 or of_one_row <= 0:
            return self.effective
        return min(self.effective, of_one_row / variance)


def unknown(predictors: int) -> Estimates:
    """Return NaN for each predictor, without intervals."""
    return Estimates(np.full(predictors, math.nan), ())


def part_of(influences: Floats, clusters: NDArray[Any] | None) -> tuple[Part, ...]:
    """The covariance of errors that are sums of `influences` (k, n); `clusters` (n,) says which rows belong together.

    None for fewer than two rows or clusters.
    """
    summed = influences
    if clusters is not None and influences.shape[1]:
        _, numbers = np.unique(clusters, return_inverse=True)
        summed = np.stack([np.bincount(numbers, row) for row in influences])
    count = summed.shape[1]
    if count < 2:
        nothing = np.full((len(influences), len(influences)), math.nan)
        return (Part(nothing, 0.0),)
    covariance: Floats = np.array([[(one * other).sum() for other in summed] for one in summed])
    return (Part(covariance * (count / (count - 1)), count - 1.0),)


def means(quantities: Floats, weights: Floats, clusters: NDArray[Any] | None = None) -> Estimates:
    """Weighted means over rows of quantities (k, n), such as losses; NaN without a weight."""
    if not weights.sum():
        return unknown(len(quantities))
    quantities, weights, clusters = _with_weight(weights, quantities, clusters)
    values = (quantities * weights).sum(axis=1) / weights.sum()
    return Estimates(values, part_of((quantities - values[:, None]) * weights / weights.sum(), clusters))


def shares(right: Floats, weights: Floats, clusters: NDArray[Any] | None = None) -> Estimates:
    """Weighted shares of rows that are `right` (k, n), 1 or 0: accuracies; NaN without a weight.

    Weights count by Kish's effective number of rows, (sum of w)^2 / sum of w^2.
    """
    if not weights.sum():
        return unknown(len(right))
    found = means(right, weights, clusters)
    right, weights, clusters = _with_weight(weights, right, clusters)
    only = np.array([[(one * (1 - other) * weights).sum() for other in right] for one in right]) / weights.sum()
    effective = float(weights.sum() ** 2 / (weights * weights).sum())
    if clusters is not None and not np.diagonal(found.covariance).any():
        effective = min(effective, float(len(np.unique(clusters))))  # all alike: a cluster may say no more than a row
    return Shares(found.values, found.parts, only=only, effective=effective, clustered=clusters is not None)


def squared_errors(
    labels: Floats, predicted: Floats, weights: Floats, clusters: NDArray[Any] | None = None
) -> dict[str, Estimates]:
    """Compute `mean_squared_error`, `root_mean_squared_error` and `r2` of predictions (k, n) of labels (n,).

    R2 is 1 - squared error / variance of the label; NaN for labels that are all equal.
    """
    squared = means((predicted - labels) ** 2, weights, clusters)
    if not weights.sum():
        return dict.fromkeys(("mean_squared_error", "root_mean_squared_error", "r2"), squared)
    labels, errors = labels[weights > 0], (predicted - labels) ** 2
    errors, weights, clusters = _with_weight(weights, errors, clusters)
    total = weights.sum()
    middle = (labels * weights).sum() / total
    around = (labels - middle) ** 2
    variance = float((around * weights).sum() / total)
    roots = np.sqrt(squared.values)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_roots = (errors - squared.values[:, None]) * weights / total / (2 * roots[:, None])
    rmse = Estimates(roots, part_of(np.where(roots[:, None] > 0, of_roots, 0.0), clusters))
    if not variance:
        return {"mean_squared_error": squared, "root_mean_squared_error": rmse, "r2": unknown(len(errors))}
    left = squared.values / variance
    influences = -(errors - left[:, None] * around) * weights / total / variance
    return {
        "mean_squared_error": squared,
        "root_mean_squared_error": rmse,
        "r2": Estimates(1 - left, part_of(influences, clusters)),
    }


def roc_auc(labels: Floats, scores: Floats, weights: Floats, clusters: NDArray[Any] | None = None) -> Estimates:
    """Area under the ROC curve: labels (n,) of 0 and 1, scores (k, n), weights (n,), clusters (n,) or None.

    NaN if a class is missing or a score of this predictor is NaN; no interval below two rows of each class. Placements
    are midranks (Sun and Xu, IEEE Signal Processing Letters 21, 2014).
    """
    yes, no = (labels == 1) & (weights > 0), (labels == 0) & (weights > 0)
    yes_weights, no_weights = weights[yes], weights[no]
    total = float(yes_weights.sum()) * float(no_weights.sum())
    if not total:
        return unknown(len(scores))
    of_yes, of_no, values = [], [], []
    for row in scores:
        # Twice the weight of the other class that is below (above) each row, ties counting half: whole numbers stay
        # whole.
        below = _weight_below(row[yes], row[no], no_weights)
        above = 2 * float(yes_weights.sum()) - _weight_below(row[no], row[yes], yes_weights)
        values.append(math.nan if np.isnan(row).any() else float((yes_weights * below).sum()) / (2 * total))
        of_yes.append(below / (2 * no_weights.sum()))
        of_no.append(above / (2 * yes_weights.sum()))
    found = np.array(values)[:, None]
    by_yes = (np.array(of_yes) - found) * yes_weights / yes_weights.sum()
    by_no = (np.array(of_no) - found) * no_weights / no_weights.sum()
    if clusters is None:
        parts = (*part_of(by_yes, None), *part_of(by_no, None))
        rows = (_effective(yes_weights), _effective(no_weights))
    else:  # a cluster may hold both classes
        parts = part_of(np.hstack([by_yes, by_no]), np.concatenate([clusters[yes], clusters[no]]))
        rows = (float(len(np.unique(clusters[yes]))), float(len(np.unique(clusters[no]))))
    return Estimates(found[:, 0], parts, "log-odds", rows)


def average_precision(
    labels: Floats, scores: Floats, weights: Floats, clusters: NDArray[Any] | None = None
) -> Estimates:
    """Area under the precision-recall curve as the mean precision at each rise of recall, without interpolation.

    Shapes as in `roc_auc`. NaN if there is no yes.
    """
    yes = weights * (labels == 1)
    if not yes.sum():
        return unknown(len(scores))
    values, influences = [], []
    for row in scores:
        if np.isnan(row).any():
            values.append(math.nan)
            influences.append(np.full(len(row), math.nan))
            continue
        order = np.argsort(-row, kind="stable")
        groups = np.cumsum(np.concatenate([[0], np.diff(row[order]) != 0]))  # rows of one score are one threshold
        of_yes, of_all = (np.bincount(groups, part[order]) for part in (yes, weights))
        reached, seen = np.cumsum(of_yes), np.cumsum(of_all)
        precision = np.divide(reached, seen, out=np.zeros_like(reached), where=seen > 0)
        value = float((of_yes * precision).sum() / yes.sum())
        # By the weight of a row: its own precision, and what it adds to those of all thresholds from its own on.
        per = np.divide(of_yes, seen, out=np.zeros_like(of_yes), where=seen > 0)
        from_here, less = (np.cumsum(part[::-1])[::-1] for part in (per, per * precision))
        is_yes = (labels[order] == 1).astype(np.float64)
        derivative = is_yes * (precision[groups] - value) + is_yes * from_here[groups] - less[groups]
        influence = np.empty(len(row))
        influence[order] = derivative * weights[order] / yes.sum()
        values.append(value)
        influences.append(influence)
    kept = weights > 0
    of_rows = np.array(influences)[:, kept]
    return Estimates(np.array(values), part_of(of_rows, None if clusters is None else clusters[kept]), "log-odds")


def wilson(share: float, rows: float) -> Estimate:
    """A share of `rows` independent rows, such as an accuracy, with Wilson's interval."""
    if not rows or math.isnan(share):
        return Estimate(share)
    middle = (share + Z95**2 / (2 * rows)) / (1 + Z95**2 / rows)
    margin = Z95 / (1 + Z95**2 / rows) * math.sqrt(share * (1 - share) / rows + Z95**2 / (4 * rows**2))
    return Estimate(share, (max(0.0, middle - margin), min(1.0, middle + margin)))


def newcombe(area: float, yes: float, no: float) -> tuple[float, float]:
    """Newcombe's interval (method 5) of an AUC of so many rows of yes and no: the areas that do not differ from it by
    more than 1.96 of their own standard errors.
    """
    middle = (yes + no) / 2 - 1
    own = 1 + middle * (1 - _GRID) / (2 - _GRID) + middle * _GRID / (1 + _GRID)
    near = _GRID[np.abs(area - _GRID) <= Z95 * np.sqrt(_GRID * (1 - _GRID) * own / (yes * no))]
    low, high = (near[0], near[-1]) if len(near) else (area, area)
    return min(float(low), area), max(float(high), area)


def t95(freedom: float) -> float:
    """Student's 97.5 % quantile for any degrees of freedom from 1 (Hill, Communications of the ACM 13, 1970)."""
    tail, n = 0.05, max(freedom, 1.0)
    if n > 1e6:
        return Z95
    if n < 1.5:
        return math.tan(math.pi / 2 * (1 - tail))
    if n < 2.5:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * tail) ** (2 / n)
    if y <= 0.05 + a:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (n + 2)
        return math.sqrt(n * (y + 1 / ((d * tail) ** (2 / n))))
    x = -Z95
    y = x * x
    if n < 5:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    return math.sqrt(n * math.expm1(a * y * y))


def _with_weight(
    weights: Floats, quantities: Floats, clusters: NDArray[Any] | None
) -> tuple[Floats, Floats, NDArray[Any] | None]:
    """Quantities (k, n), weights and clusters of the rows that have a weight."""
    kept = weights > 0
    return quantities[:, kept], weights[kept], None if clusters is None else clusters[kept]


def _effective(weights: Floats) -> float:
    return float(weights.sum() ** 2 / (weights * weights).sum())


def _on_log_odds(value: float, margin: float) -> tuple[float, float] | None:
    if not math.isfinite(margin) or not 0 < value < 1:
        return None
    middle, wide = math.log(value / (1 - value)), margin / (value * (1 - value))
    low, high = (1 / (1 + math.exp(-min(max(end, -700.0), 700.0))) for end in (middle - wide, middle + wide))
    return low, high


def _spanned(one: tuple[float, float] | None, other: tuple[float, float]) -> tuple[float, float]:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


def _weight_below(values: Floats, others: Floats, weights: Floats) -> Floats:
    """Twice the weight of `others` (m,) below each of `values` (n,), those equal to it counting half."""
    order = np.argsort(others, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    ranked = others[order]
    return sums[np.searchsorted(ranked, values, "left")] + sums[np.searchsorted(ranked, values, "right")]
