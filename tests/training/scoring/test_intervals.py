"""Intervals: formulas against SciPy and definitions written out, and their coverage by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import r2_score

from lockstep.training.scoring.estimates import (
    Estimate,
    Estimates,
    average_precision,
    means,
    newcombe,
    roc_auc,
    shares,
    squared_errors,
    t95,
    wilson,
)
from lockstep.training.scoring.scores import OutputForm, RowMetric, measure, sorted_rows


@pytest.mark.parametrize("freedom", [1, 2, 3, 3.5, 5, 7.3, 10, 30.5, 400, 1e5, 1e9])
def test_student_s_quantile_is_scipy_s(freedom: float) -> None:
    assert t95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-5)


def test_delong_s_covariance_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(3)
    labels = (rng.random(60) < 0.4).astype(np.float64)
    scores = np.round(rng.normal(size=(2, 60)) + labels * [[1.0], [0.5]], 1)
    yes, no = scores[:, labels == 1], scores[:, labels == 0]
    wins = (yes[:, :, None] > no[:, None, :]) + 0.5 * (yes[:, :, None] == no[:, None, :])  # (2, yes, no)
    of_yes, of_no = np.cov(wins.mean(axis=2)) / yes.shape[1], np.cov(wins.mean(axis=1)) / no.shape[1]
    found = roc_auc(labels, scores, np.ones(60))
    np.testing.assert_allclose(found.values, wins.mean(axis=(1, 2)), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, of_yes + of_no, rtol=1e-12)
    first, second = (part[0, 0] + part[1, 1] - 2 * part[0, 1] for part in (of_yes, of_no))
    freedom = (first + second) ** 2 / (first**2 / (yes.shape[1] - 1) + second**2 / (no.shape[1] - 1))
    less, margin = found.difference(0, 1), stats.t.ppf(0.975, freedom) * math.sqrt(first + second)
    assert less.interval == pytest.approx((less.value - margin, less.value + margin))
    assert found.difference(1, 0).value == -less.value
    doubled = roc_auc(labels, scores, np.full(60, 2.5))
    np.testing.assert_allclose(doubled.covariance, found.covariance)  # weights have no scale


def test_wilson_is_the_published_interval() -> None:
    assert wilson(0.8, 10).interval == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(0.0, 20).interval == pytest.approx((0.0, 0.16113), abs=1e-5)
    found = shares(np.array([[1.0] * 8 + [0.0] * 2]), np.full(10, 7.0)).one(0)
    assert found.interval == pytest.approx((0.49016, 0.94332), abs=1e-5)


def test_newcombe_s_interval_solves_its_equation() -> None:
    low, high = newcombe(0.9, 20, 50)
    for end in (low, high):
        own = 1 + (35 - 1) * (1 - end) / (2 - end) + (35 - 1) * end / (1 + end)
        assert abs(0.9 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) * own / 1000), abs=1e-3)
    assert newcombe(1.0, 3, 3)[1] == 1.0


def _numeric(metric: Callable[[Any], Any], weights: Any) -> Any:
    """The derivative of a metric by each row's weight."""
    step = 1e-6
    found = []
    for row in range(len(weights)):
        more, less = weights.copy(), weights.copy()
        more[row] += step
        less[row] -= step
        found.append((metric(more) - metric(less)) / (2 * step))
    return np.array(found)


@pytest.mark.parametrize("name", ["mean", "auc", "average_precision", "mean_squared_error", "rmse", "r2"])
def test_variances_are_those_of_numeric_derivatives_by_rows_and_by_clusters(name: str) -> None:
    rng = np.random.default_rng(5)
    labels = (rng.random(80) < 0.3).astype(np.float64)
    scores, weights = np.round(rng.normal(size=(2, 80)) + labels, 1), rng.random(80) + 0.2
    clusters = rng.integers(0, 12, 80)

    def found(weights: Any, clusters: Any = None) -> Estimates:
        by_name: dict[str, Callable[[], Estimates]] = {
            "mean": lambda: means(scores**2, weights, clusters),
            "auc": lambda: roc_auc(labels, scores, weights, clusters),
            "average_precision": lambda: average_precision(labels, scores, weights, clusters),
            "mean_squared_error": lambda: squared_errors(labels, scores, weights, clusters)["mean_squared_error"],
            "rmse": lambda: squared_errors(labels, scores, weights, clusters)["root_mean_squared_error"],
            "r2": lambda: squared_errors(labels, scores, weights, clusters)["r2"],
        }
        return by_name[name]()

    influences = _numeric(lambda other: found(other).values, weights) * weights[:, None]  # (80, 2)
    plain = influences.T @ influences
    strata = [labels == 1, labels == 0] if name == "auc" else [np.ones(80, bool)]
    expected = sum(influences[s].T @ influences[s] * s.sum() / (s.sum() - 1) for s in strata)
    np.testing.assert_allclose(found(weights).covariance, expected, rtol=1e-4, atol=1e-4 * plain.max())
    summed = np.stack([influences[clusters == one].sum(axis=0) for one in np.unique(clusters)])
    expected = summed.T @ summed * len(summed) / (len(summed) - 1)
    np.testing.assert_allclose(found(weights, clusters).covariance, expected, rtol=1e-4, atol=1e-4 * plain.max())
    each = found(weights, np.arange(80)).covariance  # a cluster for each row is none
    if name != "auc":
        np.testing.assert_allclose(each, found(weights).covariance, rtol=1e-12)


def test_errors_of_numbers_are_scikit_learns() -> None:
    rng = np.random.default_rng(6)
    labels, weights = rng.normal(size=200), rng.random(200)
    predicted = labels + rng.normal(size=(2, 200))
    found = squared_errors(labels, predicted, weights)
    for number, row in enumerate(predicted):
        assert found["r2"].values[number] == pytest.approx(r2_score(labels, row, sample_weight=weights), rel=1e-12)
    rows = sorted_rows(np.column_stack([labels, weights, predicted.T]))
    measured = measure(rows, [RowMetric("rmse", "root_mean_squared_error")], OutputForm(False, 1))
    assert list(measured) == ["rmse", "mean_absolute_error", "mean_squared_error", "r2"]
    assert measured["rmse"].estimates[0].value == pytest.approx(math.sqrt(((predicted[0] - labels) ** 2).mean()))
    assert all(one.interval is not None for each in measured.values() for one in each.estimates)


def _visits(rng: Any, visitors: int, rows: int, spread: float) -> tuple[Any, Any, Any]:
    """Labels, scores (2, n) and the visitor of each row: rows of a visitor share what the model cannot see."""
    clusters = np.repeat(np.arange(visitors), rows)
    own = rng.normal(size=visitors)[clusters] * spread
    seen, noise = rng.normal(size=(2, len(clusters)))
    labels = (rng.random(len(clusters)) < 1 / (1 + np.exp(-(seen + own)))).astype(np.float64)
    return labels, np.stack([seen + own / 2, seen + noise]), clusters


def _auc(positives: int, negatives: int, apart: float) -> Callable[[Any], dict[str, tuple[Estimate, float]]]:
    truth, worse = (stats.norm.cdf(d / math.sqrt(2)) for d in (apart, 0.6 * apart))

    def sample(rng: Any) -> dict[str, tuple[Estimate, float]]:
        labels = np.repeat([1.0, 0.0], [positives, negatives])
        noise = rng.normal(size=(2, positives + negatives))
        noise[1] = 0.7 * noise[0] + math.sqrt(0.51) * noise[1]
        found = roc_auc(labels, noise + np.array([[apart], [0.6 * apart]]) * labels, np.ones(len(labels)))
        return {"auc": (found.one(0, 0, 1), truth), "difference": (found.difference(0, 1), truth - worse)}

    return sample


def _accuracies(rows: int, base: float, kept: float) -> Callable[[Any], dict[str, tuple[Estimate, float]]]:
    """Of two models that differ on a share `1 - kept` of rows, where the first is right with probability 0.6."""

    def sample(rng: Any) -> dict[str, tuple[Estimate, float]]:
        both = rng.random(rows) < base
        differ, first = rng.random(rows) >= kept, rng.random(rows) < 0.6
        right = np.stack([np.where(differ, first, both), np.where(differ, ~first, both)]).astype(np.float64)
        found = shares(right, np.ones(rows))
        return {"difference": (found.difference(0, 1), (1 - kept) * 0.2)}

    return sample


def _clustered(visitors: int, rows: int) -> Callable[[Any], dict[str, tuple[Estimate, float]]]:
    rng = np.random.default_rng(9)
    labels, scores, _ = _visits(rng, 400_000 // rows, rows, 1.5)
    ones = np.ones(len(labels))
    truth = {
        "accuracy": float(((scores[0] > 0) == labels).mean()),
        "auc": float(roc_auc(labels, scores, ones).values[0]),
        "r2": float(squared_errors(labels, scores, ones)["r2"].values[0]),
        "average_precision": float(average_precision(labels, scores, ones).values[0]),
    }

    def sample(rng: Any) -> dict[str, tuple[Estimate, float]]:
        labels, scores, clusters = _visits(rng, visitors, rows, 1.5)
        ones = np.ones(len(labels))
        right = ((scores > 0) == labels).astype(np.float64)
        found = {
            "accuracy": shares(right, ones, clusters).one(0),
            "auc": roc_auc(labels, scores, ones, clusters).one(0, 0, 1),
            "r2": squared_errors(labels, scores, ones, clusters)["r2"].one(0),
            "average_precision": average_precision(labels, scores, ones, clusters).one(0, 0, 1),
        }
        return {name: (one, truth[name]) for name, one in found.items()}

    return sample


def coverage(sample: Callable[[Any], dict[str, tuple[Estimate, float]]], times: int, seed: int) -> dict[str, float]:
    """The share of intervals that hold the truth, of each name."""
    rng, hits = np.random.default_rng(seed), dict[str, list[bool]]()
    for _ in range(times):
        for name, (estimate, truth) in sample(rng).items():
            if estimate.interval is not None:
                hits.setdefault(name, []).append(estimate.interval[0] <= truth <= estimate.interval[1])
    # A few hundred of a difference of two AUCs next to 1, which mostly have no interval, say nothing.
    return {name: sum(found) / len(found) for name, found in hits.items() if len(found) > times / 4}


SHORT = [_auc(20, 500, 1.5), _auc(6, 300, 1.0), _accuracies(1000, 0.97, 0.99), _clustered(60, 5)]
WIDE, FAIR = 1.0, 0.975  # the module says of few rows that their intervals are wider than they have to be
LONG = [
    *((_auc(positives, 500, apart), WIDE) for positives in (6, 10, 20, 50, 1000) for apart in (0.5, 1.5, 2.5)),
    *(
        (_accuracies(rows, base, kept), FAIR if rows * (1 - kept) > 9 else WIDE)
        for rows in (300, 1000)
        for base in (0.5, 0.97)
        for kept in (0.9, 0.99, 0.998)
    ),
    *((_clustered(visitors, rows), FAIR) for visitors, rows in ((300, 1), (100, 5), (60, 20))),
]


@pytest.mark.parametrize("number", range(len(SHORT)))
def test_intervals_cover_what_they_say(number: int) -> None:
    """Of 400 samples of a known truth, 95 % intervals miss it in 5 %, give or take what 400 say."""
    assert {name: share for name, share in coverage(SHORT[number], 400, number).items() if not share >= 0.92} == {}


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(LONG)))
def test_intervals_cover_what_they_say_over_many_cases(number: int) -> None:
    """Too wide an interval is a fault too."""
    sample, widest = LONG[number]
    found = coverage(sample, 3000, number)
    print(number, found)
    assert {name: share for name, share in found.items() if not 0.92 <= share <= widest} == {}
