"""Exact metrics against scikit-learn, and their intervals against definitions written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from tests.training._ring import run_ring
from training.comm import Communicator
from training.scoring.scores import (
    Estimate,
    OutputForm,
    RowMetric,
    average_precision,
    binary_log_losses,
    class_log_losses,
    compared,
    gathered_on_first,
    means,
    measure,
    roc_auc,
    sorted_rows,
    wilson,
)

FORM = OutputForm(logits=False, width=1)


def made(rows: int, rate: float, seed: int, *, ties: bool, weights: str) -> tuple[Any, Any, Any]:
    """Labels (n,), scores of two predictors (2, n) and weights (n,)."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(rows) < rate).astype(np.float64)
    scores = rng.normal(size=(2, rows)) + labels * [[1.0], [0.5]]
    if ties:
        scores = np.round(scores, 1)
    found = {"ones": np.ones(rows), "some zero": rng.integers(0, 3, rows) * 0.75, "any": rng.random(rows) + 1e-3}
    return labels, scores, found[weights]


@pytest.mark.parametrize("weights", ["ones", "some zero", "any"])
@pytest.mark.parametrize(("rows", "rate", "ties"), [(40, 0.5, True), (3000, 0.01, False), (20_000, 0.002, True)])
def test_auc_average_precision_and_log_loss_are_scikit_learns(rows: int, rate: float, ties: bool, weights: str) -> None:
    labels, scores, weight = made(rows, rate, 1, ties=ties, weights=weights)
    for row in scores:
        one = row[None]
        expected = roc_auc_score(labels, row, sample_weight=weight)
        assert roc_auc(labels, one, weight).values[0] == pytest.approx(expected, abs=1e-13)
        expected = average_precision_score(labels, row, sample_weight=weight)
        assert average_precision(labels, one, weight).values[0] == pytest.approx(expected, abs=1e-13)
        probabilities = 1 / (1 + np.exp(-one))
        for losses in (
            binary_log_losses(labels, probabilities, logits=False),
            binary_log_losses(labels, one, logits=True),
        ):
            assert losses is not None
            expected = log_loss(labels, probabilities[0], sample_weight=weight)
            assert means(losses, weight).values[0] == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_classes_is_scikit_learns_and_there_is_none_of_what_is_no_probability() -> None:
    rng = np.random.default_rng(2)
    outputs, labels = rng.normal(size=(50, 4)), rng.integers(0, 4, 50)
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    expected = log_loss(labels, shares, labels=[0, 1, 2, 3])
    assert class_log_losses(labels, outputs, logits=True).mean() == pytest.approx(expected, rel=1e-12)
    assert class_log_losses(labels, shares, logits=False).mean() == pytest.approx(expected, rel=1e-12)
    shares[7] *= 2
    assert np.isinf(class_log_losses(labels, shares, logits=False)).tolist() == [row == 7 for row in range(50)]
    assert binary_log_losses(np.ones(2), np.array([[0.5, 1.1]]), logits=False) is None
    # A probability of 0 costs what one step of float32 above it does, as in scikit-learn on float32.
    sure = binary_log_losses(np.ones(1), np.zeros((1, 1)), logits=False)
    assert sure is not None and sure[0, 0] == pytest.approx(log_loss([1], np.zeros(1, np.float32), labels=[0, 1]))


def test_delong_s_covariance_is_that_of_its_definition() -> None:
    labels, scores, _ = made(60, 0.4, 3, ties=True, weights="ones")
    yes, no = scores[:, labels == 1], scores[:, labels == 0]
    wins = (yes[:, :, None] > no[:, None, :]) + 0.5 * (yes[:, :, None] == no[:, None, :])  # (2, yes, no)
    by_definition = np.cov(wins.mean(axis=2)) / yes.shape[1] + np.cov(wins.mean(axis=1)) / no.shape[1]
    found = roc_auc(labels, scores, np.ones(60))
    np.testing.assert_allclose(found.values, wins.mean(axis=(1, 2)), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, by_definition, rtol=1e-12)
    variance = by_definition[0, 0] + by_definition[1, 1] - 2 * by_definition[0, 1]
    less = found.difference(0, 1)
    assert less.interval == pytest.approx(
        (less.value - 1.959964 * variance**0.5, less.value + 1.959964 * variance**0.5)
    )
    assert found.difference(1, 0).value == -less.value
    doubled = roc_auc(labels, scores, np.full(60, 2.5))
    np.testing.assert_allclose(doubled.covariance, found.covariance)  # weights have no scale


def test_a_mean_is_compared_with_its_best_member_and_members_with_each_other() -> None:
    labels, scores, weights = made(400, 0.4, 6, ties=True, weights="any")
    chances = 1 / (1 + np.exp(-np.stack([scores.mean(axis=0), scores[1], scores[0]])))  # member b is the better one
    rows = np.column_stack([labels, weights, chances.T])
    found = compared(rows, ["mean", "a", "b"], [RowMetric("auc", "roc_auc", weighted=True)], FORM)
    assert [(one["of"], one["less"]) for one in found] == [("mean", "b"), ("a", "b")]
    for one, pair in zip(found, ([0, 2], [1, 2]), strict=True):
        expected = roc_auc(labels, chances[pair], weights).difference(0, 1)
        assert one["difference"]["auc"] == {"value": expected.value, "interval": expected.interval}
        both = binary_log_losses(labels, chances[pair], logits=False)
        assert both is not None
        losses = both[0] - both[1]
        assert one["difference"]["log_loss"]["interval"] == pytest.approx(
            (losses.mean() - 1.959964 * losses.std(ddof=1) / 20, losses.mean() + 1.959964 * losses.std(ddof=1) / 20)
        )
        assert one["difference"]["average_precision"]["interval"] is None
    rows[:, 3:] = math.nan  # members whose predictions are not finite
    broken = compared(rows, ["mean", "a", "b"], [], FORM)[0]["difference"]["roc_auc"]
    assert math.isnan(broken["value"]) and broken["interval"] is None
    rows[:, 0] = scores[0]  # labels that are numbers
    assert compared(rows, ["mean", "a", "b"], [], FORM) == []


def test_intervals_cover_what_they_say() -> None:
    """Of 400 samples of a known truth, 95 % intervals miss it in 5 %, give or take what 400 say."""
    rng = np.random.default_rng(4)
    truth, missed = 0.76025, {"auc": 0, "accuracy": 0}  # of two normal distributions one apart: Phi(1 / sqrt 2)
    for _ in range(400):
        labels = (rng.random(300) < 0.3).astype(np.float64)
        scores = (rng.normal(size=300) + labels)[None]
        found = roc_auc(labels, scores, np.ones(300))
        interval = Estimate.normal(found.values[0], found.covariance[0, 0]).interval
        assert interval is not None
        missed["auc"] += not interval[0] <= truth <= interval[1]
        share = wilson(float((rng.random(300) < 0.97).mean()), np.ones(300)).interval
        assert share is not None
        missed["accuracy"] += not share[0] <= 0.97 <= share[1]
    assert all(8 <= count <= 34 for count in missed.values()), missed


def test_wilson_is_the_published_interval() -> None:
    assert wilson(0.8, np.ones(10)).interval == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(0.0, np.ones(20)).interval == pytest.approx((0.0, 0.16113), abs=1e-5)
    assert wilson(0.8, np.full(10, 7.0)).interval == pytest.approx((0.49016, 0.94332), abs=1e-5)


def test_what_cannot_be_computed_is_nan_and_has_no_interval() -> None:
    scores = np.array([[0.1, 0.2, 0.3]])
    for labels in (np.zeros(3), np.ones(3)):
        found = roc_auc(labels, scores, np.ones(3))
        assert math.isnan(found.values[0]) and Estimate.normal(found.values[0], found.covariance[0, 0]).interval is None
    assert math.isnan(average_precision(np.zeros(3), scores, np.ones(3)).values[0])
    assert math.isnan(roc_auc(np.array([0.0, 1, 1]), np.array([[0.1, math.nan, 0.2]]), np.ones(3)).values[0])
    assert math.isnan(means(scores, np.zeros(3)).values[0])
    one_yes = roc_auc(np.array([0.0, 0, 1]), scores, np.ones(3))
    assert one_yes.values[0] == 1 and Estimate.normal(1.0, one_yes.covariance[0, 0]).interval is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_and_the_order_of_rows_change_no_bit(num_ranks: int) -> None:
    labels, scores, weights = made(999, 0.1, 5, ties=True, weights="any")
    rows = np.column_stack([labels, weights, 1 / (1 + np.exp(-scores.T))])
    asked = [RowMetric("auc", "roc_auc", weighted=True)]
    expected = measure(sorted_rows(rows), asked, FORM)
    assert list(expected) == ["auc", "roc_auc", "average_precision", "log_loss"]
    shuffled = np.random.default_rng(num_ranks).permutation(rows)
    cuts = [0, 0, 17, 999][-num_ranks - 1 :]  # of three ranks one has no row

    def work(comm: Communicator) -> Any:
        return gathered_on_first(shuffled[cuts[comm.rank] : cuts[comm.rank + 1]], comm)

    cuts[0] = 0
    first, *others = run_ring(num_ranks, work) if num_ranks > 1 else [sorted_rows(shuffled)]
    assert repr(measure(first, asked, FORM)) == repr(expected)
    assert all(len(rows_of_rank) == 0 for rows_of_rank in others)
