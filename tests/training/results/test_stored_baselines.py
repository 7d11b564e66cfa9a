"""Scores of predictions as scikit-learn has them, and what a report shows of a stored baseline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, mean_squared_error, r2_score, roc_auc_score

from lockstep.storage.errors import CorruptionError
from lockstep.storage.fs import filesystem
from lockstep.training.results import stored_baselines
from lockstep.training.run.paths import RunPaths

ABOUT = {
    "dataset": "/data/visits", "dataset_digest": "00", "split": "test", "train_split": "train", "kind": "gbt",
    "settings": ["maxDepth=2"], "user": None, "item": None, "rating": None, "seed": 0, "train_samples": 70,
    "samples": 30, "features": 4, "left_out": [],
}  # fmt: skip
MODEL = {
    "samples": 30, "model": "/runs/a/models/g0002", "metrics": {"auc": 0.75, "log_loss": 0.5},
    "intervals": {"auc": [0.7, 0.8]},
}  # fmt: skip


def test_scores_of_yes_and_no_of_classes_and_of_numbers_are_scikit_learns() -> None:
    rng = np.random.default_rng(3)
    labels, scores = rng.integers(0, 2, 400), rng.random(400)
    found = stored_baselines.scores_of(np.stack([labels, scores], axis=1), 2)
    assert found["metrics"]["roc_auc"] == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    assert found["metrics"]["accuracy"] == accuracy_score(labels, scores > 0.5)
    assert found["metrics"]["log_loss"] == pytest.approx(log_loss(labels, scores), rel=1e-9)
    assert found["class_counts"] == np.bincount(labels).tolist() and set(found["intervals"]) >= {"roc_auc", "accuracy"}
    distances = stored_baselines.scores_of(np.stack([labels, scores - 0.5], axis=1), 2, probabilities=False)
    assert distances["metrics"]["accuracy"] == found["metrics"]["accuracy"] and "log_loss" not in distances["metrics"]

    classes, shares = rng.integers(0, 3, 300), rng.dirichlet([1, 1, 1], 300)
    found = stored_baselines.scores_of(np.column_stack([classes, shares]), 3)
    assert found["metrics"]["accuracy"] == pytest.approx(accuracy_score(classes, shares.argmax(axis=1)))
    assert found["metrics"]["log_loss"] == pytest.approx(log_loss(classes, shares), rel=1e-9)

    wanted, predicted = rng.normal(size=200), rng.normal(size=200)
    found = stored_baselines.scores_of(np.stack([wanted, predicted], axis=1), None)
    squared = mean_squared_error(wanted, predicted)
    assert found["metrics"] == pytest.approx(
        {
            "mean_squared_error": squared,
            "root_mean_squared_error": math.sqrt(squared),
            "mean_absolute_error": mean_absolute_error(wanted, predicted),
            "r2": r2_score(wanted, predicted),
        }
    )
    low, high = found["intervals"]["root_mean_squared_error"]
    assert low < found["metrics"]["root_mean_squared_error"] < high and found["class_counts"] is None


def test_the_order_of_rows_changes_no_bit() -> None:
    rng = np.random.default_rng(4)
    rows = np.stack([rng.normal(size=500), rng.normal(size=500)], axis=1)
    assert stored_baselines.scores_of(rows, None) == stored_baselines.scores_of(rows[::-1], None)


def test_a_split_with_one_class_has_no_auc() -> None:
    found = stored_baselines.scores_of(np.array([[1.0, 0.2], [1.0, 0.9]]), 2)
    assert found["metrics"]["roc_auc"] == "nan"


def result(**changes: Any) -> dict[str, Any]:
    scores = {
        "metrics": {"roc_auc": 0.7, "log_loss": 0.6},
        "intervals": {"roc_auc": [0.6, 0.8]},
        "class_counts": [9, 21],
    }
    return {**ABOUT, **scores, **changes}


def test_a_report_shows_the_model_next_to_each_baseline(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    fs, paths = filesystem(run), RunPaths(run)
    assert stored_baselines.stored(fs, paths) == []
    first = stored_baselines.store(run, result(), MODEL)
    assert stored_baselines.store(run, result(), MODEL) == first, "the same baseline again replaces its file"
    stored_baselines.store(run, result(kind="tree", settings=[]), MODEL)
    stored_baselines.store(run, result(split="validation"), MODEL)
    tables = dict(stored_baselines.tables(stored_baselines.stored(fs, paths)))
    head, log_loss, auc = tables["Baselines on test of visits, with 95 % intervals"]
    assert head == ["metric", "model of this run (g0002)", "gbt (maxDepth=2)", "tree"]
    assert log_loss == ["log_loss", "0.5000", "0.6000", "0.6000"]
    spans = [Markup(cell).striptags() for cell in auc]
    assert spans == ["roc_auc", "0.75000.7000 to 0.8000", "0.70000.6000 to 0.8000", "0.70000.6000 to 0.8000"]
    assert len(tables) == 2
    Path(first).write_bytes(Path(first).read_bytes().replace(b"0.7", b"0.9"))
    with pytest.raises(CorruptionError):
        stored_baselines.stored(fs, paths)


def of_auc(value: float, low: float, high: float, name: str = "roc_auc") -> dict[str, Any]:
    return {"metrics": {name: value}, "intervals": {name: [low, high]}}


def test_the_strongest_baseline_is_named_whatever_its_auc_is_called() -> None:
    model = {**of_auc(0.75, 0.70, 0.80, "auc"), "dataset": "/visits", "split": "test", "samples": 30}
    own = {"name": "rate:page", **of_auc(0.55, 0.5, 0.6, "auc")}
    weak, strong = ({"baseline": result(kind=kind, **of_auc(*values))}
                    for kind, values in (("tree", (0.5, 0.4, 0.6)), ("gbt", (0.65, 0.6, 0.69))))  # fmt: skip
    (words,) = stored_baselines.strongest_words(model, own, [weak, strong], "auc")
    assert words == (
        "the strongest of 3 baselines, gbt (maxDepth=2), has auc 0.6500 (0.6000 to 0.6900), the model 0.7500 "
        "(0.7000 to 0.8000): the model is better, the intervals are apart"
    )
    (words,) = stored_baselines.strongest_words(model, {**own, **of_auc(0.9, 0.85, 0.95, "auc")}, [weak], "auc")
    assert "rate:page" in words and words.endswith("the baseline is better, the intervals are apart")
    (words,) = stored_baselines.strongest_words(model, None, [{"baseline": result(**of_auc(0.7, 0.6, 0.75))}], "auc")
    assert words.startswith("the baseline, gbt") and "the intervals overlap" in words
    errors = of_auc(2.0, 1.9, 2.1, "mean_absolute_error")
    (words,) = stored_baselines.strongest_words(
        of_auc(1.0, 0.9, 1.1, "mean_absolute_error"), None, [{"baseline": result(**errors)}], "mean_absolute_error"
    )
    assert "the model is better" in words, "the lower error is the better one"
    assert stored_baselines.strongest_words(model, own, [], "auc") == []
    assert stored_baselines.strongest_words(model, None, [{"baseline": result(**of_auc("nan", 0, 1))}], "auc") == []  # type: ignore[arg-type] # as JSON has it


def test_the_text_names_what_was_fitted_on_what() -> None:
    assert stored_baselines.text(result(), MODEL).splitlines() == [
        "test of visits: 30 samples; gbt fitted on 70 of train, 4 columns",
        "metric    gbt     95 % interval     this run's model  95 % interval",
        "log_loss  0.6000  -                 0.5000            -",
        "roc_auc   0.7000  0.6000 to 0.8000  0.7500            0.7000 to 0.8000",
    ]
    assert stored_baselines.text(result()).splitlines()[1] == "metric    gbt     95 % interval"
