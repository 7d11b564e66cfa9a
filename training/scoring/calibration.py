"""Calibration of predicted probabilities, the ROC curve, and the confusion matrix of predicted classes. NumPy only.

Bins have equal counts: a row's bin follows from its rank. Rows of equal predictions share the bin of their middle rank,
so that no bin depends on the order of rows. The expected calibration error is the mean distance between a bin's mean
prediction and its observed rate, weighted by the bins' rows. Weights of rows do not count, as they do not in the ROC
curve and in the other metrics of this project. In a sampled split, a row counts 1 / the share of its class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.sampled import corrected
from lockstep.training.scoring.estimates import Floats
from lockstep.training.scoring.scores import LABEL, OUTPUTS, OutputForm, class_counts, class_shares

BINS = 10
MOST_CLASSES = 100  # of a confusion matrix
ROC_POINTS = 100
PREDICTED, CONFIDENCE, SQUARED_ERROR = range(3)  # columns of `class_columns`


def class_columns(labels: NDArray[Any], outputs: NDArray[Any], form: OutputForm) -> Floats:
    """Compute (n, 3) of a batch of classes: the predicted class, its probability, and the squared error of all
    probabilities.

    `labels` (n,), numbers of classes or one-hot (n, classes); outputs (n, classes). The last two are NaN for outputs
    that are not probabilities.
    """
    numbers = (labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(-1)).astype(int)
    predicted, each = outputs.argmax(axis=1), np.arange(len(outputs))
    shares = class_shares(outputs, form)
    if shares is None:
        unknown = np.full(len(outputs), np.nan)
        return np.stack([predicted, unknown, unknown], axis=1)
    # (1 - p)^2 of the label's probability, and p^2 of all others
    squared = (shares * shares).sum(axis=1) + 1 - 2 * shares[each, numbers]
    return np.stack([predicted, shares[each, predicted], squared], axis=1)


def yes_shares(outputs: Floats, form: OutputForm) -> Floats | None:
    """The probability of yes (n,) of outputs (n,), corrected for sampled classes; None for other outputs."""
    shares: Floats = np.exp(-np.logaddexp(0.0, -outputs)) if form.logits else outputs
    if not ((shares >= 0) & (shares <= 1)).all():
        return None
    return shares if form.kept is None else corrected(shares, form.kept)


def calibration(predicted: Floats, happened: Floats, squared: Floats, stands: Floats | None = None) -> dict[str, Any]:
    """Return {bins: [{samples, predicted, observed}], expected_error, error_by_chance, brier} of probabilities (n,),
    outcomes 0 or 1 (n,), and each row's squared error (n,); a row `stands` for so many (n,), by default one.

    `error_by_chance` is the expected error that these predictions would show if they were right.
    """
    if stands is None:
        stands = np.ones(len(predicted))
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - (counts + 1) / 2  # of ranks from 0
    bins = np.floor(middles * BINS / len(predicted)).astype(np.int64)[inverse]
    rows = np.bincount(bins, minlength=BINS)
    there = rows > 0
    total = np.bincount(bins, stands, BINS)[there]
    means = [np.bincount(bins, values * stands, BINS)[there] / total for values in (predicted, happened)]
    # A sum of rows, each a yes by its own probability, is so far from its mean on average (by the normal distribution).
    spread = np.sqrt(np.bincount(bins, stands**2 * predicted * (1 - predicted), BINS)[there])
    found = zip(rows[there].tolist(), means[0].tolist(), means[1].tolist(), strict=True)
    return {
        "bins": [{"samples": samples, "predicted": mean, "observed": rate} for samples, mean, rate in found],
        "expected_error": float((np.abs(means[0] - means[1]) * total).sum() / stands.sum()),
        "error_by_chance": float(math.sqrt(2 / math.pi) * spread.sum() / stands.sum()),
        "brier": float((squared * stands).sum() / stands.sum()),
    }


def calibration_of(rows: Floats, details: Floats, form: OutputForm) -> dict[str, Any] | None:
    """The `calibration` of a split's rows, and `of`: `yes` or `the predicted class`. None for outputs without
    probabilities, or labels that are not classes.

    `rows` are the columns of `scores.measure`, `details` those of `class_columns` (none for yes-or-no labels).
    """
    labels = rows[:, LABEL]
    if form.width is None or not len(rows) or (form.binary and class_counts(labels, None) is None):
        return None
    if form.binary:
        shares = yes_shares(rows[:, OUTPUTS], form)
        if shares is None:
            return None
        return {"of": "yes", **calibration(shares, labels, (shares - labels) ** 2, form.stands_for(labels))}
    if np.isnan(details).any():
        return None
    right = (details[:, PREDICTED] == labels).astype(np.float64)
    found = calibration(details[:, CONFIDENCE], right, details[:, SQUARED_ERROR], form.stands_for(labels))
    return {"of": "the predicted class", **found}


def confusion_of(
    rows: Floats, details: Floats, form: OutputForm, classes: int | None, names: Sequence[str] | None
) -> dict[str, Any] | None:
    """Return {classes: names, samples: [[rows of true class i that are predicted as j]]}; without `names` their
    numbers.

    Yes is predicted above a probability of 0.5, before any correction. None where `calibration_of` is for yes or no,
    and above MOST_CLASSES classes.
    """
    labels = rows[:, LABEL]
    if form.width is None or not len(rows) or (form.binary and class_counts(labels, None) is None):
        return None
    if form.binary:
        outputs, size = rows[:, OUTPUTS], 2
        if yes_shares(outputs, form) is None:
            return None
        predicted = (outputs > (0.0 if form.logits else 0.5)).astype(np.int64)
    else:
        predicted, size = details[:, PREDICTED].astype(np.int64), max(classes or 0, form.width)
        if size > MOST_CLASSES:
            return None
    counts = np.bincount(labels.astype(np.int64) * size + predicted, minlength=size * size)
    named = list(names) if names is not None and len(names) == size else [str(number) for number in range(size)]
    return {"classes": named, "samples": counts.reshape(size, size).tolist()}  # (size * size,) -> (size, size)


def roc_of(rows: Floats, form: OutputForm) -> dict[str, list[list[float]]] | None:
    """The ROC curve of yes-or-no labels: {model: points, baseline: points if `rows` have one}, each point [share of no
    above a threshold, share of yes above it], from [0, 0] to [1, 1]: of `roc_auc`, which counts each row once. None
    unless there are a yes and a no.
    """
    labels = rows[:, LABEL]
    if not form.binary or not len(rows) or class_counts(labels, None) is None:
        return None
    if not ((labels == 1).any() and (labels == 0).any()):
        return None
    columns = zip(("model", "baseline"), range(OUTPUTS, rows.shape[1]), strict=False)
    return {name: _roc(labels, rows[:, column]) for name, column in columns}


def _roc(labels: Floats, scores: Floats) -> list[list[float]]:
    """Points at up to ROC_POINTS thresholds, evenly spaced along the curve."""
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # of rows with equal scores
    shares = []
    for label in (0, 1):
        sums = np.cumsum(labels[order] == label)[last]
        shares.append(np.concatenate([[0.0], sums / sums[-1]]))
    along = shares[0] + shares[1]
    chosen = np.unique(np.searchsorted(along, np.linspace(0, 2, ROC_POINTS)).clip(0, len(along) - 1))
    chosen = np.unique([0, *chosen, len(along) - 1])
    return [[float(no), float(yes)] for no, yes in zip(shares[0][chosen], shares[1][chosen], strict=True)]
