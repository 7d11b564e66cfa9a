"""Evaluation: the same at any number of ranks and rows at a time, and what plain Keras says."""

from __future__ import annotations

import os
import shutil
import signal
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    f1_score,
    log_loss,
    roc_auc_score,
)

from lockstep.features.schema.sampled import corrected
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, ExistsError
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import RankTask
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.evaluate import summary
from lockstep.training.results.export_run import export_run
from lockstep.training.run import notes
from lockstep.training.run.weights_source import weights_at
from lockstep.training.scoring.scores import OutputForm, output_columns
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run, run_threads
from tests.training._tiny import write_clicks, write_images, write_table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(run, dataset): 30 test rows in 4 blocks."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_table(folder / "data")
    options: dict[str, Any] = {"global_batch": 16, "epochs": 2, "launcher": "local", "num_ranks": 1}
    run(
        TrainConfig(
            datasets=(str(folder / "data"),), run=str(folder / "run"), model="logistic", keep_best="loss:max", **options
        )
    )
    return str(folder / "run"), str(folder / "data")


@pytest.mark.parametrize(
    ("num_ranks", "batch"),
    [
        (1, 512),  # all at once
        (2, 7),  # uneven last batches
        (5, 512),  # a rank without a row
    ],
)
def test_ranks_and_batches_change_no_result(trained: tuple[str, str], num_ranks: int, batch: int) -> None:
    import keras

    url, dataset = trained
    result = evaluate(url, dataset, "test", run_threads, num_ranks=num_ranks, batch=batch, baseline="majority")
    split = OpenSplit.at(dataset, "test")
    rows = split.encoder.encode(read_all(split.reader))
    assert rows.y is not None
    model = keras.models.load_model(Path(result["model"], "model.keras"))
    plain = model.evaluate(rows.x, rows.y, batch_size=30, verbose=0, return_dict=True)
    assert result["samples"] == 30
    assert set(result["metrics"]) - set(plain) == {"average_precision", "log_loss"}
    plain["auc"] = roc_auc_score(rows.y, model.predict(rows.x, verbose=0)[:, 0])  # Keras' own is by thresholds
    assert {name: result["metrics"][name] for name in plain} == pytest.approx(plain, rel=1e-5)
    train = OpenSplit.at(dataset, "train")
    labels = train.encoder.encode(read_all(train.reader, [train.reader.table.run(i) for i in range(14)])).y
    assert labels is not None
    of_majority = np.mean(rows.y == (labels.mean() > 0.5))
    assert result["baseline"]["metrics"]["accuracy"] == pytest.approx(of_majority)
    assert result["baseline"]["metrics"]["auc"] == pytest.approx(0.5)
    assert "majority" in summary(result)


def test_an_unfinished_run_is_evaluated_by_its_checkpoint(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    whole = evaluate(url, dataset, "test", run_threads)
    shutil.copytree(url, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "results")
    part = evaluate(str(tmp_path / "run"), dataset, "test", run_threads)
    assert "step-0000000006" in part["model"]
    assert part["metrics"] == whole["metrics"]
    for which, step in (("best", 6), (6, 6), ("last", 12)):
        of_one = evaluate(url, dataset, "test", run_threads, checkpoint=which)
        assert f"step-{step:010}" in of_one["model"] and (of_one["metrics"] == whole["metrics"]) == (step == 6)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(DataError, match="neither a model nor a checkpoint"):
        evaluate(str(tmp_path / "run"), dataset, "test", run_threads)


def test_rows_that_the_run_did_not_have_are_evaluated_alike_by_model_and_checkpoint(
    trained: tuple[str, str], tmp_path: Path
) -> None:
    url, _ = trained
    other = str(tmp_path / "other")
    write_table(other, seed=9)
    found = [evaluate(url, other, "test", run_threads, checkpoint=which) for which in (None, 6)]
    assert "step-0000000006" in found[1]["model"] and "checkpoint" not in found[0]["model"]
    import keras

    rows = OpenSplit.at(other, "test").encoder.encode(read_all(OpenSplit.at(other, "test").reader))
    assert rows.y is not None
    plain = keras.models.load_model(Path(found[0]["model"], "model.keras"))
    for one in found:
        assert one["metrics"]["auc"] == pytest.approx(roc_auc_score(rows.y, plain.predict(rows.x, verbose=0)[:, 0]))


def test_a_run_on_two_datasets_is_evaluated_on_each(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "ab"]
    for seed, url in enumerate(urls):
        write_table(url, seed=seed)
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1}
    config = TrainConfig(datasets=tuple(urls), run=str(tmp_path / "run"), model="logistic", **options)
    run(config)
    for url in urls:
        of_model, of_checkpoint = (
            evaluate(config.run, url, "test", run_threads, checkpoint=which) for which in (None, "last")
        )
        assert of_model["metrics"] == of_checkpoint["metrics"]
    shutil.rmtree(urls[0])
    with pytest.raises(ConfigError, match="another digest") as caught:
        evaluate(config.run, urls[1], "test", run_threads, checkpoint="last")
    assert urls[0] in caught.value.got


def test_other_classes_of_the_same_numbers_are_refused(tmp_path: Path) -> None:
    """The numbers are the same, and so would be the result: a wrong one."""
    names = {"data": "cat cow dog owl", "more": "cat cow dog owl", "other": "cat cow owl rat", "numbers": ""}
    urls = {name: str(tmp_path / name) for name in names}
    for seed, (name, words) in enumerate(names.items()):
        write_images(urls[name], seed=seed, class_names=words.split())
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1, "model": "mlp"}
    runs = [str(tmp_path / f"run-{name}") for name in ("data", "other")]
    for url, name in zip(runs, ("data", "other"), strict=True):
        run(TrainConfig(datasets=(urls[name],), run=url, **options))
    got = "classes cat, cow, owl, rat (not cat, cow, dog, owl)"
    for which in (None, "last"):
        evaluate(runs[0], urls["more"], "test", run_threads, checkpoint=which)
        with pytest.raises(ConfigError, match="another list of classes") as caught:
            evaluate(runs[0], urls["other"], "test", run_threads, checkpoint=which)
        assert caught.value.got == got
    predict([runs[0]], urls["numbers"], "test", str(tmp_path / "one"), run_threads)
    with pytest.raises(ConfigError, match="cannot be averaged") as caught:
        predict(runs, urls["numbers"], "test", str(tmp_path / "both"), run_threads)
    assert caught.value.got == got


def test_pixels_that_were_made_otherwise_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"job": "etl_images", "store": "pixels", "rotate": 0, "max_pixels": 10_000}
    for seed, (name, fit) in enumerate({"data": "pad", "same": "pad", "other": "crop"}.items()):
        manifest = write_images(tmp_path / name, seed=seed)
        created = {**manifest.created_by, "config": {**made, "fit": fit}}
        (tmp_path / name / "_manifest.json").write_bytes(replace(manifest, created_by=created).to_bytes())
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1, "model": "mlp"}
    run(TrainConfig(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), **options))
    for name, noted in (("same", False), ("other", True)):
        capsys.readouterr()
        evaluate(str(tmp_path / "run"), str(tmp_path / name), "test", run_threads)
        assert ("pixels were made with --fit crop, the model's with --fit pad" in capsys.readouterr().err) is noted


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"split": "group:visitor:80/20"}, 'declare `visitor` in --schema with encoding = { kind = "ignore" }'),
        ({"split": "kfold:5:visitor"}, "declare `visitor` in --schema"),
        ({"split": "group:visitor:80/20", "role_columns": {}}, "as records with a --schema"),
        ({"split": "group:a:80/20"}, None),  # stored: intervals count its values
        ({"split": "80/20"}, None),
    ],
)
def test_groups_that_are_not_stored_are_named_with_what_stores_them(
    config: dict[str, Any],
    words: str | None,
    trained: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, dataset = trained
    shutil.copytree(dataset, tmp_path / "data")
    manifest = load_dataset(dataset)
    created = {**manifest.created_by, "config": config}
    (tmp_path / "data" / "_manifest.json").write_bytes(replace(manifest, created_by=created).to_bytes())
    found = evaluate(url, str(tmp_path / "data"), "test", run_threads)
    told = capsys.readouterr().err
    assert words in told if words else "independent" not in told
    assert bool(found.get("clusters")) == (config["split"] == "group:a:80/20")


def test_what_cannot_be_evaluated(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    with pytest.raises(ConfigError, match="no split"):
        evaluate(url, dataset, "validation", run_threads)
    with pytest.raises(ConfigError, match="baseline"):
        evaluate(url, dataset, "test", run_threads, baseline="rate:a")
    write_images(tmp_path / "images")
    with pytest.raises(ConfigError, match="another schema") as caught:
        evaluate(url, str(tmp_path / "images"), "test", run_threads)
    assert "no field `a`; no field `b`; field `image` (not there)" in caught.value.got
    shutil.copytree(url, tmp_path / "run")
    file = tmp_path / "run" / "models" / "g0001" / "model.keras"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"model\.keras"):
        evaluate(str(tmp_path / "run"), dataset, "test", run_threads)


def weights_of(url: str) -> list[Any]:
    import keras

    weights: list[Any] = keras.models.load_model(Path(url, "model.keras")).get_weights()
    return weights


def test_any_checkpoint_becomes_a_model_and_a_model_the_first_weights(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    done = export_run(url, str(tmp_path / "model"), run_threads)
    of_run = weights_of(f"{url}/models/g0001")
    for mine, theirs in zip(weights_of(done.output), of_run, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert verify(done.output) == []
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1}
    file = f"{done.output}/model.keras"
    assert weights_at(done.output).file == weights_at(file).file == Path(file).read_bytes()
    sources = (file, f"{url}/checkpoints/{done.checkpoint}")
    for number, source in enumerate(sources):
        config = TrainConfig(
            datasets=(dataset,), run=str(tmp_path / f"run{number}"), model="logistic", init_from=source,
            learning_rate=1e-30, **options,
        )  # fmt: skip
        second = run(config)
        assert second.model is not None
        for mine, theirs in zip(weights_of(second.model), of_run, strict=True):
            np.testing.assert_array_equal(mine, theirs)  # no step of such a rate changes a float32
    # Each epoch's end has a checkpoint where the best is kept, whatever --checkpoint-every; the loss fell.
    assert export_run(url, str(tmp_path / "last"), run_threads, checkpoint="last").checkpoint.step == 12
    assert done.checkpoint.step == 6
    with pytest.raises(ConfigError, match="--keep-best"):
        export_run(str(tmp_path / "run0"), str(tmp_path / "none"), run_threads, checkpoint="best")


def test_what_cannot_be_exported_or_begun_from(trained: tuple[str, str], tmp_path: Path) -> None:
    url, dataset = trained
    with pytest.raises(ConfigError, match="no such checkpoint"):
        export_run(url, str(tmp_path / "model"), run_threads, checkpoint=3)
    with pytest.raises(ExistsError):
        export_run(url, str(tmp_path), run_threads)
    with pytest.raises(ConfigError, match="into its run"):
        export_run(url, f"{url}/models/g0002", run_threads)  # a later generation's name

    def ended(task: RankTask, num_ranks: int, **options: Any) -> list[dict[str, Any]]:
        Path(task.payload["directory"]).mkdir()
        os.kill(os.getpid(), signal.SIGTERM)
        return [{}]

    with pytest.raises(SystemExit):
        export_run(url, str(tmp_path / "model"), ended)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other.keras").write_bytes(b"PK\3\4 no archive")
    options: dict[str, Any] = {"global_batch": 16, "epochs": 1, "launcher": "local", "num_ranks": 1}
    content = bytearray(Path(url, "models", "g0001", "model.keras").read_bytes())
    content[content.rindex(b"PK\1\2") + 6] = 0xFF  # written by another version of zip, the archive's list says
    (tmp_path / "later.keras").write_bytes(content)
    with zipfile.ZipFile(f"{url}/models/g0001/model.keras") as archive:
        weights = archive.read("model.weights.h5")
    (tmp_path / "changed.weights.h5").write_bytes(weights.replace(b"HEAP", b"heap"))  # where HDF5 has names
    refused = dict.fromkeys(("other.keras", "later.keras", "changed.weights.h5"), CorruptionError)
    for source, error in {"no.keras": ConfigError, dataset: ConfigError, **refused}.items():
        config = TrainConfig(
            datasets=(dataset,),
            run=str(tmp_path / "run"),
            model="logistic",
            init_from=str(tmp_path / source),
            **options,
        )
        with pytest.raises(error):
            run(config)


OPTIONS: dict[str, Any] = {"global_batch": 64, "epochs": 2, "launcher": "local", "num_ranks": 1}


@pytest.fixture(scope="module")
def clicked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """(run, the dataset that it was trained on, a later day with ten times as many clicks)."""
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder / "data", records={"train": 2000, "test": 1500})
    write_clicks(folder / "later", records={"train": 500, "test": 500}, log_odds=-3.0, seed=1)
    run(
        TrainConfig(
            datasets=(str(folder / "data"),),
            run=str(folder / "run"),
            model="tests.training._models:clicks",
            **OPTIONS,
        )
    )
    return str(folder / "run"), str(folder / "data"), str(folder / "later")


def rows_of(dataset: str, split: str) -> tuple[Any, Any]:
    """(raw rows, what a model is fed of them), in the order of the files."""
    opened = OpenSplit.at(dataset, split)
    blocks = [opened.reader.table.run(block) for block in range(opened.reader.table.num_blocks)]
    raw = read_all(opened.reader, blocks)
    return raw, opened.encoder.encode(raw)


def rates_of(dataset: str, raw: Any) -> Any:
    """`rate:page` by the training split's weights, for other rows."""
    train, _ = rows_of(dataset, "train")
    table = train.select(["page", "click", "weight"]).to_pandas()
    table["weight"] = table["weight"].astype(float)
    table["yes"] = table["click"] * table["weight"]
    sums, mean = table.groupby("page")[["yes", "weight"]].sum(), table["yes"].sum() / table["weight"].sum()
    smoothing = 10 * table["weight"].mean()
    rates = (sums["yes"] + smoothing * mean) / (sums["weight"] + smoothing)
    return raw.column("page").to_pandas().map(rates).to_numpy()


@pytest.fixture(scope="module")
def alone(clicked: tuple[str, str, str]) -> dict[str, Any]:
    """What one rank evaluates."""
    return evaluate(*clicked[:2], "test", run_threads, batch=100, baseline="rate:page")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_rare_labels_weights_and_logits_are_scored_exactly(
    clicked: tuple[str, str, str], alone: dict[str, Any], num_ranks: int
) -> None:
    import keras

    url, dataset, _ = clicked
    options: dict[str, Any] = {"num_ranks": num_ranks, "batch": 100, "baseline": "rate:page"}
    result = alone if num_ranks == 1 else evaluate(url, dataset, "test", run_threads, **options)
    raw, rows = rows_of(dataset, "test")
    model = keras.models.load_model(Path(result["model"], "model.keras"))
    logits = np.concatenate([
        model.predict_on_batch({name: values[start : start + 100] for name, values in rows.x.items()})[:, 0]
        for start in range(0, 1500, 100)
    ]).astype(np.float64)  # fmt: skip
    y, weight = rows.y, rows.weight
    assert y.mean() < 0.02 and result["class_counts"] == [int((y == 0).sum()), int(y.sum())]
    rates = rates_of(dataset, raw).astype(np.float32).astype(np.float64)
    regularised = sum(float(loss) for loss in model.losses)
    for scores, found in ((1 / (1 + np.exp(-logits)), result), (rates, result["baseline"])):
        hinge = np.maximum(0, 1 - (2 * y - 1) * np.log(scores / (1 - scores)))
        expected = {
            "auc": roc_auc_score(y, scores),
            "weighted_auc": roc_auc_score(y, scores, sample_weight=weight),
            "pr": average_precision_score(y, scores),
            "accuracy": accuracy_score(y, scores > 0.5),
            "weighted_accuracy": accuracy_score(y, scores > 0.5, sample_weight=weight),
            "f1_score": f1_score(y, np.log(scores / (1 - scores)) > 0.5),
            "bce": log_loss(y, scores),
            "log_loss": log_loss(y, scores),
            "hinge": hinge.mean(),
            "weighted_hinge": np.average(hinge, weights=weight),
            "distance": np.abs(y - np.log(scores / (1 - scores))).mean(),
            "loss_without_regularisation": log_loss(y, scores, sample_weight=weight) * weight.mean(),
        }
        if found is result:
            expected["loss"] = expected["loss_without_regularisation"] + regularised
        assert found["metrics"] == pytest.approx(expected, rel=2e-5, abs=1e-7)
        for name in ("auc", "weighted_auc", "pr", "log_loss"):
            assert found["metrics"][name] == pytest.approx(expected[name], rel=1e-6 if name == "log_loss" else 1e-12)
    assert set(result["intervals"]) == {"auc", "weighted_auc", "pr", "accuracy", "weighted_accuracy", "log_loss"}
    assert result["compared_by"] == "auc"
    for part in ("intervals", "class_counts", "difference"):
        assert result[part] == alone[part]  # the same bits
    assert {name: result["metrics"][name] for name in result["intervals"]} == {
        name: alone["metrics"][name] for name in alone["intervals"]
    }


def test_the_baseline_is_of_what_the_run_was_trained_on(
    clicked: tuple[str, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, dataset, later = clicked
    result = evaluate(url, later, "test", run_threads, baseline="rate:page")
    raw, rows = rows_of(later, "test")
    expected = roc_auc_score(rows.y, rates_of(dataset, raw).astype(np.float32))
    assert result["baseline"]["metrics"]["auc"] == pytest.approx(expected, rel=1e-12)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    share, trained = f"{rows.y.mean():.2%}", f"{rows_of(dataset, 'train')[1].y.mean():.2%}"
    assert f"class 1 is {share} of split `test` and {trained} of the training data" in lines[0]
    assert lines[1:] == [f"note: {notes.of_baseline(result)[0]}"]
    evaluate(url, later, "test", run_threads)  # the run itself says what it was trained on
    assert f"class 1 is {share} of split `test` and 0.7" in capsys.readouterr().err
    shutil.copytree(url, tmp_path / "run")
    shutil.move(dataset, tmp_path / "data")
    shutil.copytree(later, dataset)
    try:
        with pytest.raises(ConfigError, match=r"cannot be counted on the run.s training rows"):
            evaluate(url, later, "test", run_threads, baseline="rate:page")
    finally:
        shutil.rmtree(dataset)
        shutil.move(tmp_path / "data", dataset)


def test_one_class_and_a_metric_that_is_no_number_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_clicks(tmp_path / "data", records={"train": 320, "test": 100}, log_odds=-40.0)
    options = {**OPTIONS, "model": "tests.training._models:correlated"}
    result = run(TrainConfig(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), **options))
    assert result.class_counts == [320, 0]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line.split(";")[0] for line in lines] == [
        "note: no finite number in the metrics of epoch 1: pearson_correlation nan",
        "note: all 320 labels of the training data are 0, so no metric shows whether a model distinguishes classes",
    ]  # once, in two epochs
    assert all("; next: " in line for line in lines)
    evaluated = evaluate(str(tmp_path / "run"), str(tmp_path / "data"), "test", run_threads, baseline="majority")
    assert evaluated["metrics"]["roc_auc"] == "nan" and evaluated["class_counts"] == [100, 0]
    told = capsys.readouterr().err
    for words in ("all 100 labels of split `test` are 0", "all 320 labels of what the run", "average_precision nan"):
        assert words in told


@pytest.mark.parametrize(
    ("exported", "config"),
    [
        (True, {"sampled": {"column": "click", "shares": {"false": "1/4"}, "splits": ["train"]}}),
        (False, {"sampled": {"column": "click", "shares": {"false": "1/4"}, "splits": ["train"]}}),
        (True, {"weights": "balanced", "class_counts": {"false": 400, "true": 100}}),
    ],
    ids=["sampled", "sampled, not exported", "weighted"],
)
def test_log_losses_are_corrected_for_what_training_was_sampled_or_weighted_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exported: bool, config: dict[str, Any]
) -> None:
    """The manifest says that of rows without a click a quarter was kept for training, or counts in it; the test split
    has all.
    """
    import keras

    manifest = write_clicks(tmp_path / "data", records={"train": 400, "test": 1200}, log_odds=-3.0)
    own = {**manifest.created_by, "config": config}
    (tmp_path / "data" / "_manifest.json").write_bytes(replace(manifest, created_by=own).to_bytes())
    options = {**OPTIONS, "model": "tests.training._models:knows_clicks", "epochs": 1}
    run(TrainConfig(datasets=(str(tmp_path / "data"),), run=str(tmp_path / "run"), **options))
    if not exported:  # then the dataset says it, which is the run's
        shutil.rmtree(tmp_path / "run" / "results")
    result = evaluate(str(tmp_path / "run"), str(tmp_path / "data"), "test", run_threads, baseline="majority")
    _, rows = rows_of(str(tmp_path / "data"), "test")
    model = keras.models.load_model(next((tmp_path / "run" / "models").glob("*/model.keras")))
    chance = 1 / (1 + np.exp(-model.predict(rows.x, verbose=0)[:, 0].astype(np.float64)))
    metrics = result["metrics"]
    assert metrics["log_loss"] == pytest.approx(log_loss(rows.y, chance), rel=1e-6)
    assert metrics["corrected_log_loss"] == pytest.approx(log_loss(rows.y, corrected(chance, (0.25, 1))), rel=1e-6)
    _, train = rows_of(str(tmp_path / "data"), "train")
    prior = corrected(np.array([np.average(train.y, weights=train.weight)]), (0.25, 1))[0]
    expected = log_loss(rows.y, np.full(1200, prior))
    assert result["baseline"]["metrics"]["corrected_log_loss"] == pytest.approx(expected, rel=1e-5)
    no, yes = result["baseline"]["class_counts"]
    told = capsys.readouterr().err
    rows_of_no = 4 * no if "sampled" in config else no  # before it was sampled
    assert (f"{yes / (rows_of_no + yes):.2%} of the training data" in told) == ("sampled" in config)
    found = result["calibration"]
    assert found["brier"] == pytest.approx(brier_score_loss(rows.y, corrected(chance, (0.25, 1))), rel=1e-6)
    assert result["weighted"] == ["loss", "weighted_auc", "weighted_hinge"][: len(result["weighted"])]
    assert "rows count by their weights in loss" in summary(result)


def test_log_losses_of_classes_are_corrected_too() -> None:
    outputs, labels = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 3
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    kept = (0.5, 1.0, 0.1)
    for given, logits in ((outputs, True), (shares, False)):
        found = output_columns(labels, given, OutputForm(logits, kept=kept))
        assert found is not None
        assert found[:, 0].mean() == pytest.approx(log_loss(labels, shares), rel=1e-9)
        assert found[:, 1].mean() == pytest.approx(log_loss(labels, corrected(shares, kept)), rel=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.01, 0.05, ""),
        (-0.01, 0.05, "cannot be distinguished from its baseline majority: auc 0.7200 and 0.7000"),
        (-0.05, -0.01, "is worse than its baseline majority"),
    ],
)
def test_a_model_is_held_against_its_baseline(low: float, high: float, said: str) -> None:
    result = {
        "metrics": {"auc": 0.72}, "baseline": {"name": "majority", "metrics": {"auc": 0.70}}, "compared_by": "auc",
        "difference": {"auc": {"value": 0.02, "interval": [low, high]}},
    }  # fmt: skip
    found = notes.of_baseline(result)
    assert (found == []) if not said else (said in found[0] and "; next: " in found[0])
    assert notes.of_baseline({**result, "baseline": None, "difference": {}, "compared_by": None}) == []


@pytest.mark.parametrize(
    ("trained", "evaluated", "far"),
    [
        ([9990, 10], [990, 10], True),  # 0.1 % and 1 %
        ([9990, 10], [498, 2], False),  # 0.4 %, but two clicks may be chance
        ([500_000, 500_000], [520_000, 480_000], False),  # not by chance, but near enough
        ([300, 300, 300], [10, 300, 590], True),
        ([1, 0], [5, 5], False),
        (None, [5, 5], False),
    ],
)
def test_base_rates_far_apart_are_said(trained: list[int] | None, evaluated: list[int], far: bool) -> None:
    assert bool(notes.of_base_rates(trained, evaluated, "test")) is far
