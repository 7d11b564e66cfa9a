"""Splits, weights, fitted statistics, baselines and evaluations are what pandas and scikit-learn make of the input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, r2_score, roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.preprocessing import StandardScaler, TargetEncoder
from sklearn.utils.class_weight import compute_class_weight

from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.training.launch.local import run_local
from lockstep.training.reading.open import OpenSplit
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.judge._sets import JudgedSet, trained, with_ids, written
from tests.training._threads import run_threads
from tests.training._tiny import write_clicks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

REAL = [
    pytest.param("incomes", "rate:education", (3,), marks=pytest.mark.shared_data),
    ("clicks", "rate:position", (1, 3)),
    ("visits", "rate:page", (1, 3)),
    ("garments", "majority", (2,)),
]


@pytest.fixture
def judged(request: pytest.FixtureRequest) -> JudgedSet:
    """The set that a test's parameter names."""
    found: JudgedSet = request.getfixturevalue(request.param)
    return found


def expected_metrics(labels: Any, outputs: Any, weights: Any) -> dict[str, float]:
    """What scikit-learn says of probabilities (n, 1) of yes, or (n, classes)."""
    if outputs.shape[1] > 1:
        right, loss = outputs.argmax(axis=1) == labels, log_loss(labels, outputs, labels=range(outputs.shape[1]))
        return {"accuracy": right.mean(), "log_loss": loss, "loss": loss}
    scores = outputs[:, 0]
    weighted = log_loss(labels, scores, sample_weight=weights) * (1 if weights is None else weights.mean())
    without_weights = {}
    if (
        weights is not None
    ):  # of classes: a probability learned from weighted rows has odds that are w_1 / w_0 too large
        odds = scores / (1 - scores) * weights[labels == 0][0] / weights[labels == 1][0]
        without_weights = {"corrected_log_loss": log_loss(labels, odds / (1 + odds))}
    return {
        **without_weights,
        "auc": roc_auc_score(labels, scores),
        "average_precision": average_precision_score(labels, scores),
        "accuracy": accuracy_score(labels, scores > 0.5),
        "r2": r2_score(labels, scores),
        "log_loss": log_loss(labels, scores),
        "loss": weighted,
    }


def predictions_of_baseline(judged: JudgedSet, name: str) -> np.ndarray:
    """The same baseline by scikit-learn, which has no weights for its TargetEncoder: there by pandas."""
    train, test = judged.rows("train"), judged.rows("test")
    labels, column = train[judged.label], name.partition(":")[2]
    if name == "majority":
        found = DummyClassifier(strategy="prior").fit(train[[judged.label]], labels).predict_proba(test)
    elif "weight" not in train:
        encoder = TargetEncoder(target_type="binary", smooth=10.0).fit(train[[column]], labels)
        found = encoder.transform(test[[column]])
    else:
        weights = train["weight"].astype(np.float64)
        sums = pd.DataFrame({"yes": weights * labels, "all": weights}).groupby(train[column]).sum()
        smoothing, mean = 10 * weights.mean(), (weights * labels).sum() / weights.sum()
        rates = (sums["yes"] + smoothing * mean) / (sums["all"] + smoothing)
        found = test[column].map(rates).fillna(mean).to_numpy()[:, None]
    return np.asarray(found, np.float32)


@pytest.mark.parametrize(("judged", "baseline", "ranks"), REAL, indirect=["judged"])
def test_evaluations_are_scikit_learns_at_any_number_of_ranks(
    judged: JudgedSet, baseline: str, ranks: tuple[int, ...]
) -> None:
    fed = judged.fed("test")
    expected = expected_metrics(fed.y, judged.predictions("test"), fed.weight)
    of_baseline = expected_metrics(fed.y, predictions_of_baseline(judged, baseline), fed.weight)
    first = None
    for num_ranks in ranks:
        result = judged.evaluated(num_ranks, baseline)
        assert result["samples"] == len(fed) == judged.manifest.splits["test"].records
        assert result["class_counts"] == np.bincount(fed.y.astype(int), minlength=len(result["class_counts"])).tolist()
        for found, wanted in ((result, expected), (result["baseline"], of_baseline)):
            assert sorted(found["metrics"]) == sorted(wanted)
            assert found["metrics"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            for name in {"auc", "average_precision", "accuracy"} & wanted.keys():  # not sums of float32
                assert found["metrics"][name] == pytest.approx(wanted[name], rel=1e-12)
        first = first or result
        for part in ("intervals", "difference", "class_counts"):
            assert result[part] == first[part]
    train = judged.rows("train")[judged.label].astype(int)
    assert first is not None and first["baseline"]["class_counts"] == np.bincount(train).tolist()


def test_processes_say_what_threads_do(clicks: JudgedSet) -> None:
    """18 clicks, two processes: the threads of the other tests are no part of the result."""
    processes, threads = (clicks.evaluated(2, "rate:position", launch) for launch in (run_local, run_threads))
    for part in ("intervals", "difference", "class_counts"):
        assert processes[part] == threads[part]
    assert processes["metrics"] == pytest.approx(threads["metrics"], rel=1e-6)


@pytest.mark.shared_data
def test_classes_are_split_in_one_ratio_and_weighed_as_scikit_learn_does(incomes: JudgedSet) -> None:
    rows = written(incomes)
    assert sorted(rows["row"]) == incomes.raw["row"].tolist()
    merged = rows.merge(incomes.raw, on="row", suffixes=("", "_raw"))
    for name in ("age", "education", "hours", "rich"):
        assert (merged[name] == merged[f"{name}_raw"]).all(), name
    assert merged["job"].isna().equals(merged["job_raw"].isna())
    train = rows[rows["split"] == "train"]
    theirs, _ = next(StratifiedShuffleSplit(1, train_size=0.8, random_state=0).split(rows, rows["rich"]))
    counts, wanted = train["rich"].value_counts(), rows["rich"].iloc[theirs].value_counts()
    assert (counts - wanted).abs().max() <= 1
    classes = np.array([False, True])
    weights = dict(zip(classes, compute_class_weight("balanced", classes=classes, y=train["rich"]), strict=True))
    np.testing.assert_array_equal(rows["weight"], rows["rich"].map(weights).astype(np.float32))


@pytest.mark.shared_data
def test_statistics_are_of_the_training_split_as_scikit_learn_and_pandas_have_them(incomes: JudgedSet) -> None:
    train = incomes.rows("train")
    for name in ("age", "hours"):
        scaler = StandardScaler().fit(train[[name]].astype(np.float64))
        stored = json.loads(Path(incomes.url, "_fitted", f"{name}.json").read_text())
        assert stored["count"] == len(train) and stored["fitted_on"] == ["train"]
        assert (stored["mean"], stored["variance"]) == pytest.approx((scaler.mean_[0], scaler.var_[0]), rel=1e-12)
        values = incomes.rows("test")[[name]].astype(np.float64)
        np.testing.assert_allclose(incomes.fed("test").x[name], scaler.transform(values), rtol=1e-5, atol=1e-6)
    for name in ("job", "education"):
        check_vocabulary(incomes, name, max_size=50, min_count=5)


def test_vocabularies_of_a_log_are_pandas_counts(visits: JudgedSet) -> None:
    check_vocabulary(visits, "page", max_size=2000, min_count=3)
    check_vocabulary(visits, "prev_page", max_size=1000, min_count=5)


def check_vocabulary(judged: JudgedSet, name: str, *, max_size: int, min_count: int) -> None:
    counts = judged.rows("train")[name].value_counts()
    pairs = sorted((-n, str(token).encode(), str(token)) for token, n in counts.items() if n >= min_count)[:max_size]
    stored = json.loads(Path(judged.url, "_fitted", f"{name}.json").read_text())
    assert stored["tokens"] == [token for _, _, token in pairs] and len(pairs) > 5
    assert stored["counts"] == [-n for n, _, _ in pairs]
    values, fed = judged.rows("test")[name], judged.fed("test").x[name]
    places = {token: column for column, (_, _, token) in enumerate(pairs)}
    wanted = [None if value is None else places.get(value, len(places)) for value in values]
    assert fed.sum(axis=1).tolist() == [0 if place is None else 1 for place in wanted]
    assert fed.argmax(axis=1).tolist() == [place or 0 for place in wanted]


def test_visits_are_those_that_pandas_reads(visits: JudgedSet) -> None:
    """Counts, labels, features and whole visitors, by the visitors and times that the dataset itself does not tell."""
    assets = "gif|jpe?g|png|xbm|bmp|ico|svg|css|js|mpe?g|avi|mov|wav|au|mp3|mp4|zip|gz|z|tar|exe|woff2?"
    raw, counts = visits.raw, visits.manifest.counts
    good = (raw["status"].astype(int).between(200, 299)) | (raw["status"] == "304")
    pages = raw[(raw["method"] == "GET") & good & ~raw["page"].str.contains(rf"(?i)\.(?:{assets})$")].copy()
    asked = pages.groupby("visitor")["time"].apply(np.sort)
    pages["stays"] = [
        np.searchsorted(asked[who], at + 1800, "right") > np.searchsorted(asked[who], at, "right")
        for who, at in zip(pages["visitor"], pages["time"], strict=True)
    ]
    kept = pages[pages["time"] + 1800 <= raw["time"].max()]
    assert (counts.read, counts.written, counts.quarantined) == (8000, len(kept), 0)
    assert counts.dropped == {"not_a_page": 8000 - len(pages), "censored": len(pages) - len(kept)}
    rows = written(visits).merge(with_ids(kept), on="sample_id", suffixes=("", "_raw"))
    assert len(rows) == len(kept)
    assert (rows["page"] == rows["page_raw"]).all() and (rows["stays"] == rows["stays_raw"]).all()
    assert (rows["hour"] == rows["time"] // 3600 % 24).all()
    assert rows.groupby("visitor")["split"].nunique().max() == 1


def test_folds_hold_each_row_once_and_are_fitted_without_the_one_held_out(small: SparkSession, folder: Path) -> None:
    rng = np.random.default_rng(6)
    raw = pd.DataFrame({"n": np.arange(300), "x": rng.lognormal(size=300), "yes": rng.random(300) < 0.3})
    encoding = {"kind": "standardise", "file": "x.json"}
    schema = Schema((
        sample_id_field(),
        Field(name="n", dtype="int64", encoding={"kind": "ignore"}),
        Field(name="x", dtype="float64", encoding=encoding),
        Field(name="yes", dtype="bool", kind="label"),
    ))  # fmt: skip
    url = folder / "folds"
    write_dataset(small.createDataFrame(raw), str(url), id_columns=["n"], schema=schema, split="kfold:3")
    names = [f"fold-{number}" for number in range(3)]
    opened = {name: OpenSplit.at(str(url), name) for name in names}
    rows = {name: read_all(split.reader) for name, split in opened.items()}
    numbers = {name: batch.column("n").to_pylist() for name, batch in rows.items()}
    assert sorted(n for found in numbers.values() for n in found) == list(range(300))
    for held_out in names:
        others = raw[~raw["n"].isin(numbers[held_out])]
        scaler = StandardScaler().fit(others[["x"]])
        stored = json.loads(Path(url, "_fitted", f"x.{held_out}.json").read_text())
        assert (stored["mean"], stored["variance"]) == pytest.approx((scaler.mean_[0], scaler.var_[0]), rel=1e-12)
        fed = opened[held_out].encoder.encode(rows[held_out]).x["x"][:, 0]
        wanted = scaler.transform(raw.set_index("n").loc[numbers[held_out], ["x"]])[:, 0]
        np.testing.assert_allclose(fed, wanted, rtol=1e-5, atol=1e-6)
    # Trained on two folds, the baseline is of these two, and the third is fed by what was fitted on them.
    done = trained(url, split="fold-0,fold-2", global_batch=32)
    result = evaluate(done.run, str(url), "fold-1", run_threads, num_ranks=2, baseline="majority")
    rate = raw.loc[~raw["n"].isin(numbers["fold-1"]), "yes"].mean()
    labels = raw.loc[numbers["fold-1"], "yes"]
    wanted = -(labels * np.log(rate) + (1 - labels) * np.log(1 - rate)).mean()
    assert result["baseline"]["metrics"]["log_loss"] == pytest.approx(wanted, rel=1e-6)
    assert load_dataset(str(url)).counts.written == 300


def test_the_truth_lies_in_the_interval_of_a_model_that_knows_it(folder: Path) -> None:
    """Rare clicks with the log-odds -6 + a / 2 + page / 4, and a model of just these."""
    write_clicks(folder / "known", records={"train": 64, "test": 6000}, seed=1)
    result = evaluate(
        trained(folder / "known", "tests.training._models:knows_clicks", epochs=1).run, str(folder / "known"), "test",
        run_threads, num_ranks=2, baseline="majority",
    )  # fmt: skip
    # Their distribution: 10 pages, and a normal a in steps.
    a = (np.arange(-60_000, 60_001) / 10_000)[None]
    weight = np.repeat(np.exp(-(a**2) / 2), 10, axis=0)
    chance = 1 / (1 + np.exp(-(-6 + a / 2 + np.arange(10)[:, None] / 4)))
    order = np.argsort(chance, axis=None)
    yes, no = ((weight * share).reshape(-1)[order] for share in (chance, 1 - chance))
    auc = (yes * (np.cumsum(no) - no / 2)).sum() / yes.sum() / no.sum()
    entropy = -(weight * (chance * np.log(chance) + (1 - chance) * np.log(1 - chance))).sum() / weight.sum()
    for name, truth in (("auc", auc), ("log_loss", entropy)):
        low, high = result["intervals"][name]
        assert low < truth < high and high - low < 0.2, (name, truth, low, high)
    assert result["difference"]["auc"]["interval"][0] > 0 and not math.isnan(result["metrics"]["auc"])
