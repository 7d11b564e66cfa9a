"""The mean of several models, and what is reported of its rows, against scikit-learn on the models' predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, confusion_matrix, log_loss, roc_auc_score

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.evaluate import summary
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.training._threads import run, run_threads
from tests.training._tiny import write_clicks, write_images

pytestmark = pytest.mark.slow
BATCH = 100
OPTIONS: dict[str, Any] = {"global_batch": 64, "epochs": 2, "launcher": "local", "num_ranks": 1}


def rows_of(dataset: str) -> tuple[Any, Any]:
    """(raw rows, what a model is fed of them) of the test split, in the order of the files."""
    opened = OpenSplit.at(dataset, "test")
    raw = read_all(opened.reader)
    return raw, opened.encoder.encode(raw)


def outputs_of(url: str, x: dict[str, Any], rows: int) -> Any:
    """A model's outputs (rows, size) float64, by the batches of the evaluation."""
    import keras

    model = keras.models.load_model(Path(url, "model.keras"))
    parts = [slice(start, start + BATCH) for start in range(0, rows, BATCH)]
    batches = [model.predict_on_batch({name: values[part] for name, values in x.items()}) for part in parts]
    return np.concatenate(batches).astype(np.float64)


def test_the_mean_of_models_its_slices_and_its_calibration(tmp_path: Path) -> None:
    """One model has log-odds and the other probabilities; the loss is the first one's."""
    data = str(tmp_path / "data")
    write_clicks(data, records={"train": 640, "test": 500}, log_odds=-1.0)
    runs = [str(tmp_path / name) for name in ("odds", "chances")]
    for url, model in zip(runs, ("tests.training._models:clicks", "logistic"), strict=True):
        run(TrainConfig(datasets=(data,), run=url, model=model, **OPTIONS))
    found = [
        evaluate(
            runs, data, "test", run_threads, num_ranks=ranks, batch=BATCH, slices=("page", "a"), baseline="rate:page"
        )
        for ranks in (1, 3)
    ]
    result = found[0]
    for part in ("intervals", "class_counts", "difference", "calibration", "roc", "confusion", "slices"):
        assert found[1][part] == result[part], part  # the same bits
    raw, rows = rows_of(data)
    odds, chances = (outputs_of(url, rows.x, 500)[:, 0] for url in result["model"])
    mean, y = (1 / (1 + np.exp(-odds)) + chances) / 2, rows.y
    metrics = result["metrics"]
    assert metrics["auc"] == pytest.approx(roc_auc_score(y, mean), abs=1e-12)
    assert metrics["weighted_auc"] == pytest.approx(roc_auc_score(y, mean, sample_weight=rows.weight), abs=1e-12)
    assert metrics["log_loss"] == pytest.approx(log_loss(y, mean), rel=1e-12)
    assert metrics["bce"] == pytest.approx(log_loss(y, mean), rel=1e-5)  # Keras' own, float32
    assert metrics["loss"] == pytest.approx(log_loss(y, mean, sample_weight=rows.weight) * rows.weight.mean(), rel=1e-5)
    best, pair = result["comparisons"]
    areas = {url: member["metrics"]["auc"] for url, member in zip(runs, result["members"], strict=True)}
    assert best["of"] == "mean" and best["less"] == max(areas, key=lambda url: areas[url])
    assert best["difference"]["auc"]["value"] == pytest.approx(metrics["auc"] - max(areas.values()), abs=1e-12)
    assert (pair["of"], pair["less"]) == tuple(runs) and found[1]["comparisons"] == result["comparisons"]
    each = [-np.log(np.where(y == 1, p, 1 - p)) for p in (1 / (1 + np.exp(-odds)), chances)]
    low, high = pair["difference"]["log_loss"]["interval"]
    assert pair["difference"]["log_loss"]["value"] == pytest.approx((each[0] - each[1]).mean(), rel=1e-6)
    assert (high - low) / 2 == pytest.approx(1.96473 * (each[0] - each[1]).std(ddof=1) / 500**0.5, rel=1e-4)
    alone = evaluate(runs[1], data, "test", run_threads, batch=BATCH, slices=("page", "a"), baseline="rate:page")
    member = result["members"][1]
    assert {name: member[name] for name in alone if name not in ("dataset", "split", "chosen_on", "class_names")} == {
        name: value for name, value in alone.items() if name not in ("dataset", "split", "chosen_on", "class_names")
    }
    page = raw.column("page").to_numpy()
    assert {one["value"] for one in result["slices"]["page"]} == set(map(str, range(10)))
    for one in result["slices"]["page"]:
        mine = page == int(one["value"])
        assert one["samples"] == mine.sum()
        assert one["metrics"]["auc"] == pytest.approx(roc_auc_score(y[mine], mean[mine]), abs=1e-12)
    assert [one["samples"] for one in result["slices"]["a"]] == [125] * 4
    calibration = result["calibration"]
    observed, predicted = calibration_curve(y, mean, n_bins=10, strategy="quantile")
    assert [one["observed"] for one in calibration["bins"]] == pytest.approx(observed, abs=1e-12)
    assert [one["predicted"] for one in calibration["bins"]] == pytest.approx(predicted, abs=1e-12)
    assert calibration["brier"] == pytest.approx(brier_score_loss(y, mean), abs=1e-12)
    assert result["confusion"]["samples"] == confusion_matrix(y, mean > 0.5).tolist()
    text = summary(result)
    for words in (
        "mean of 2",
        "odds - chances",
        f"mean - {Path(best['less']).name} (best)",
        "calibration of yes",
        "true \\ predicted",
        "\n\na ",
    ):
        assert words in text, words
    with pytest.raises(ConfigError, match="no slices by"):
        evaluate(runs, data, "test", run_threads, slices=("pages",))

    # Classes, with the names that lockstep etl_images stores.
    images, names = tmp_path / "images", ["north-west", "north-east", "south-west", "south-east"]
    manifest = write_images(images, records={"train": 320, "test": 150})
    own = {**manifest.created_by, "config": {"class_names": names}}
    (images / "_manifest.json").write_bytes(replace(manifest, created_by=own).to_bytes())
    seeds = [str(tmp_path / f"seed-{seed}") for seed in range(2)]
    for seed, url in enumerate(seeds):
        run(TrainConfig(datasets=(str(images),), run=url, model="tests.training._models:softmax", seed=seed, **OPTIONS))
    result = evaluate(seeds, str(images), "test", run_threads, num_ranks=2, batch=BATCH)
    _, rows = rows_of(str(images))
    mean = sum(outputs_of(url, rows.x, 150) for url in result["model"]) / 2
    assert result["metrics"]["log_loss"] == pytest.approx(log_loss(rows.y, mean), rel=1e-6)
    assert result["metrics"]["accuracy"] == np.mean(mean.argmax(axis=1) == rows.y)
    confused = confusion_matrix(rows.y, mean.argmax(axis=1)).tolist()
    assert result["confusion"] == {"classes": names, "samples": confused}
    assert result["calibration"]["brier"] == pytest.approx(((mean - np.eye(4)[rows.y]) ** 2).sum(axis=1).mean())
    assert [one["difference"]["accuracy"]["value"] for one in result["comparisons"][:1]] == [
        pytest.approx(result["metrics"]["accuracy"] - max(one["metrics"]["accuracy"] for one in result["members"]))
    ]
    with pytest.raises(ConfigError, match="another schema"):
        evaluate([seeds[0], runs[0]], str(images), "test", run_threads)
