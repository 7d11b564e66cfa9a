"""Exact metrics against scikit-learn, and their intervals against definitions written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from lockstep.training.comm import Communicator
from lockstep.training.scoring.estimates import average_precision, means, roc_auc
from lockstep.training.scoring.scores import (
    OutputForm,
    RowMetric,
    binary_log_losses,
    class_log_losses,
    compared,
    gathered_on_first,
    measure,
    sorted_rows,
)
from tests.training._ring import run_ring

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
            (losses.mean() - 1.965927 * losses.std(ddof=1) / 20, losses.mean() + 1.965927 * losses.std(ddof=1) / 20)
        )  # 1.965927: Student's t of 399 degrees of freedom
    rows[:, 3:] = math.nan  # members whose predictions are not finite
    broken = compared(rows, ["mean", "a", "b"], [], FORM)[0]["difference"]["roc_auc"]
    assert math.isnan(broken["value"]) and broken["interval"] is None
    rows[:, 0] = scores[0]  # labels that are numbers
    assert compared(rows, ["mean", "a", "b"], [], FORM) == []


def test_what_cannot_be_computed_is_nan_and_has_no_interval() -> None:
    scores = np.array([[0.1, 0.2, 0.3]])
    for labels in (np.zeros(3), np.ones(3)):
        found = roc_auc(labels, scores, np.ones(3))
        assert math.isnan(found.values[0]) and found.one(0).interval is None
    assert math.isnan(average_precision(np.zeros(3), scores, np.ones(3)).values[0])
    assert math.isnan(roc_auc(np.array([0.0, 1, 1]), np.array([[0.1, math.nan, 0.2]]), np.ones(3)).values[0])
    assert math.isnan(means(scores, np.zeros(3)).values[0])
    one_yes = roc_auc(np.array([0.0, 0, 1]), scores, np.ones(3))
    assert one_yes.values[0] == 1 and one_yes.one(0).interval is None


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
