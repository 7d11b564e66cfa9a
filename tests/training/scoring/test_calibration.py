"""Calibration, ROC and confusion against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import auc, brier_score_loss, confusion_matrix, log_loss, roc_auc_score, roc_curve

from lockstep.features.schema.sampled import corrected
from lockstep.training.scoring.calibration import (
    MOST_CLASSES,
    PREDICTED,
    ROC_POINTS,
    calibration,
    calibration_of,
    class_columns,
    confusion_of,
    roc_of,
)
from lockstep.training.scoring.scores import OutputForm, measure

BINARY, CLASSES = OutputForm(logits=False, width=1), OutputForm(logits=False, width=4)


def rows_of(labels: Any, outputs: Any) -> Any:
    """The columns label, weight and output of a binary model."""
    return np.stack([labels, np.ones(len(labels)), outputs], axis=1).astype(np.float64)


def made(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    chance = rng.random(rows)
    return (rng.random(rows) < chance**2).astype(np.float64), chance


@pytest.mark.parametrize("logits", [False, True])
def test_bins_and_brier_score_are_scikit_learns(logits: bool) -> None:
    labels, chance = made(1000)
    outputs = np.log(chance / (1 - chance)) if logits else chance
    found = calibration_of(rows_of(labels, outputs), np.empty((1000, 0)), OutputForm(logits, width=1))
    assert found is not None and found["of"] == "yes"
    observed, predicted = calibration_curve(labels, chance, n_bins=10, strategy="quantile")
    assert [one["samples"] for one in found["bins"]] == [100] * 10
    assert [one["predicted"] for one in found["bins"]] == pytest.approx(predicted, rel=1e-12)
    assert [one["observed"] for one in found["bins"]] == pytest.approx(observed, rel=1e-12)
    assert found["expected_error"] == pytest.approx(np.abs(observed - predicted).mean(), rel=1e-12)
    assert found["brier"] == pytest.approx(brier_score_loss(labels, chance), rel=1e-12)


def test_one_prediction_for_all_rows_is_one_bin() -> None:
    labels = np.array([0, 0, 0, 1.0])
    found = calibration(np.full(4, 0.25), labels, (labels - 0.25) ** 2)
    assert found["bins"] == [{"samples": 4, "predicted": 0.25, "observed": 0.25}] and found["expected_error"] == 0
    many = np.array([0.1, *[0.5] * 18, 0.9])  # the middle of the equal ones decides
    assert [one["samples"] for one in calibration(many, many, many)["bins"]] == [1, 18, 1]


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.booleans()), min_size=1), st.randoms())
def test_bins_hold_all_rows_in_any_order(rows: list[tuple[float, bool]], random: Any) -> None:
    def bins(rows: list[tuple[float, bool]]) -> list[tuple[Any, ...]]:
        predicted, happened = np.array(rows, np.float64).T
        found = calibration(predicted, happened, np.zeros(len(rows)))["bins"]
        return [(one["samples"], round(one["predicted"], 12), round(one["observed"], 12)) for one in found]

    first = bins(rows)
    assert sum(samples for samples, *_ in first) == len(rows)
    assert sorted(first, key=lambda one: one[1]) == first
    mixed = list(rows)
    random.shuffle(mixed)
    assert bins(mixed) == first


def test_a_model_trained_on_sampled_classes_is_judged_by_corrected_probabilities() -> None:
    labels, chance = made(1000)
    kept = (0.25, 1.0)
    found = calibration_of(rows_of(labels, chance), np.empty((1000, 0)), OutputForm(False, 1, kept))
    assert found is not None
    assert found["brier"] == pytest.approx(brier_score_loss(labels, corrected(chance, kept)), rel=1e-12)


def test_classes_are_scikit_learns() -> None:
    rng = np.random.default_rng(5)
    shares, labels = rng.dirichlet(np.ones(4), 500), rng.integers(0, 3, 500)
    rows, details = rows_of(labels, np.zeros(500)), class_columns(labels, shares, CLASSES)
    confused = confusion_of(rows, details, CLASSES, 4, ["a", "b", "c", "d"])
    assert confused is not None and confused["classes"] == ["a", "b", "c", "d"]
    assert confused["samples"] == confusion_matrix(labels, shares.argmax(axis=1), labels=range(4)).tolist()
    found = calibration_of(rows, details, CLASSES)
    assert found is not None
    right, most = labels == shares.argmax(axis=1), shares.max(axis=1)
    observed, predicted = calibration_curve(right, most, n_bins=10, strategy="quantile")
    assert [one["observed"] for one in found["bins"]] == pytest.approx(observed, rel=1e-12)
    assert [one["predicted"] for one in found["bins"]] == pytest.approx(predicted, rel=1e-12)
    one_hot = np.eye(4)[labels]
    assert found["brier"] == pytest.approx(((shares - one_hot) ** 2).sum(axis=1).mean(), rel=1e-12)
    np.testing.assert_array_equal(class_columns(one_hot, shares, CLASSES), details)
    logarithms = class_columns(labels, np.log(shares), OutputForm(True, 4))
    np.testing.assert_allclose(logarithms, details, rtol=1e-12)


def test_yes_and_no_are_confused_at_a_half() -> None:
    labels, chance = made(200)
    expected = confusion_matrix(labels, chance > 0.5).tolist()
    for form, outputs in ((BINARY, chance), (OutputForm(True, 1), np.log(chance / (1 - chance)))):
        found = confusion_of(rows_of(labels, outputs), np.empty((200, 0)), form, None, None)
        assert found == {"classes": ["0", "1"], "samples": expected}


def test_what_has_no_probabilities_has_no_calibration() -> None:
    none = np.empty((2, 0))
    for rows, form in (
        (rows_of([0, 2.5], [0.1, 0.2]), BINARY),  # numbers
        (rows_of([0, 1], [0.1, 1.2]), BINARY),
        (rows_of([0, 1], [np.nan, 0.2]), BINARY),
        (rows_of([0, 1], [0.1, 0.2]), OutputForm(logits=False)),
    ):
        assert calibration_of(rows, none, form) is None and confusion_of(rows, none, form, None, None) is None
    scores = class_columns(np.array([1, 0]), np.array([[3.0, 1.0], [4.0, -1.0]]), OutputForm(False, 2))
    assert scores[:, PREDICTED].tolist() == [0, 0]
    rows = rows_of([1, 0], [0, 0])
    assert calibration_of(rows, scores, OutputForm(False, 2)) is None
    confused = confusion_of(rows, scores, OutputForm(False, 2), 2, ["only one"])
    assert confused == {"classes": ["0", "1"], "samples": [[1, 0], [1, 0]]}
    assert confusion_of(rows, scores, OutputForm(False, MOST_CLASSES + 1), MOST_CLASSES + 1, None) is None


def test_the_roc_curve_is_scikit_learns_at_fewer_thresholds() -> None:
    labels, chance = made(3000)
    weights = 1 + np.arange(3000) % 3
    rows = np.stack([labels, weights, chance, np.round(chance, 1)], axis=1)
    found = roc_of(rows, BINARY)
    assert found is not None and set(found) == {"model", "baseline"}
    for name, scores in (("model", chance), ("baseline", np.round(chance, 1))):
        no, yes = np.array(found[name]).T
        assert found[name][0] == [0, 0] and found[name][-1] == [1, 1] and len(no) <= ROC_POINTS + 2
        whole = roc_curve(labels, scores, drop_intermediate=False)  # weights count neither here nor in roc_auc
        apart = np.abs(no - whole[0][:, None]) + np.abs(yes - whole[1][:, None])  # (its points, ours)
        assert apart.min(axis=0).max() < 1e-12
        exact = roc_auc_score(labels, scores)
        assert auc(no, yes) == pytest.approx(exact, abs=2e-3)
    few = roc_of(rows_of(labels[:20], chance[:20]), BINARY)
    assert few is not None and "baseline" not in few
    no, yes = np.array(few["model"]).T
    assert auc(no, yes) == pytest.approx(roc_auc_score(labels[:20], chance[:20]), rel=1e-12), "of few rows each point"


def test_one_class_and_numbers_have_no_roc_curve() -> None:
    assert roc_of(rows_of([1.0, 1.0], [0.2, 0.9]), BINARY) is None
    assert roc_of(rows_of([0.5, 1.5], [0.2, 0.9]), BINARY) is None
    assert roc_of(rows_of([0.0, 1.0], [0.2, 0.9]), CLASSES) is None


def test_a_split_that_was_sampled_itself_is_judged_as_if_it_were_whole() -> None:
    """A fold of a dataset with --sample: corrected probabilities are compared with the rows that the thin ones stand
    for.
    """
    rng = np.random.default_rng(8)
    chance = 1 / (1 + np.exp(4 - 1.5 * rng.normal(size=200_000)))
    labels = (rng.random(200_000) < chance).astype(np.float64)
    kept = (0.1, 1.0)
    odds = chance / (1 - chance) / 0.1  # what a perfect model of the thinned rows predicts
    there = rng.random(200_000) < np.where(labels == 1, *kept[::-1])
    form = OutputForm(logits=False, width=1, kept=kept, thinned=kept)
    rows = rows_of(labels[there], (odds / (1 + odds))[there])
    weights = np.where(labels[there] == 1, 1.0, 10.0)
    measured = measure(rows, [], form)["corrected_log_loss"].estimates[0]
    assert measured.value == pytest.approx(log_loss(labels[there], chance[there], sample_weight=weights), rel=1e-9)
    assert measured.interval is not None
    assert measured.interval[0] < log_loss(labels, chance) < measured.interval[1]
    found = calibration_of(rows, np.empty((len(rows), 0)), form)
    assert found is not None
    assert found["brier"] == pytest.approx(brier_score_loss(labels[there], chance[there], sample_weight=weights))
    assert found["brier"] == pytest.approx(brier_score_loss(labels, chance), rel=0.03)
    assert found["expected_error"] < 0.003
    assert found["expected_error"] == pytest.approx(found["error_by_chance"], rel=1.0)


def test_the_error_by_chance_is_that_of_perfect_predictions() -> None:
    rng = np.random.default_rng(9)
    chance = rng.random(500) ** 2
    seen = [
        calibration(chance, (rng.random(500) < chance).astype(np.float64), np.zeros(500))["expected_error"]
        for _ in range(300)
    ]
    told = calibration(chance, np.zeros(500), np.zeros(500))["error_by_chance"]
    assert np.mean(seen) == pytest.approx(told, rel=0.05)
