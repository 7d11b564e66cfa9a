"""The gallery of examples: each README's commands run as they stand, and the figures that they print are compared with
what pandas and scikit-learn compute of the same data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, roc_auc_score, root_mean_squared_error, top_k_accuracy_score

from tests.docs.steps import ACTIVATE, ROOT, Step, link_project, run_steps, steps_of

EXAMPLES = ROOT / "examples"
GALLERY = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
MOST_LINES = 80  # of a README: one screen, and a half for what should be seen


def steps(name: str) -> list[Step]:
    """The blocks of commands of an example's README."""
    return steps_of((EXAMPLES / name / "README.md").read_text(encoding="utf-8"))


def ran(name: str, folder: Path) -> str:
    """Run the commands of an example in a folder of their own; returns all that they print."""
    link_project(folder)
    return "".join(run_steps([Step(ACTIVATE, False, [], ""), *steps(name)], folder))


def number(pattern: str, printed: str) -> float:
    """The number in the pattern's group."""
    found = re.search(pattern, printed)
    assert found, f"{pattern} is not in\n{printed}"
    return float(found[1])


def below(folder: Path, pattern: str) -> Path:
    """The only path of a pattern below the results."""
    (found,) = (folder / ".demo").glob(pattern)
    return found


def train_and_test(files: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of both splits, as pandas reads folders `split=...`."""
    rows = pd.read_parquet(files)
    return rows[rows["split"] == "train"], rows[rows["split"] == "test"]


def test_each_example_is_in_the_gallery_and_has_a_test() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    files = [*Path(__file__).parent.glob("test_*.py"), ROOT / "tests" / "cluster" / "test_examples.py"]
    tests = "".join(file.read_text("utf-8") for file in files)
    assert len(GALLERY) >= 13
    assert [name for name in GALLERY if f"]({name}/README.md)" not in page or f'ran("{name}"' not in tests] == []


@pytest.mark.parametrize("name", GALLERY)
def test_a_readme_is_short_and_says_what_should_be_seen(name: str) -> None:
    text = (EXAMPLES / name / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert steps(name) and [step.commands for step in steps(name) if not step.seen] == []
    assert "](../../docs/" in text, "no page explains more"


@pytest.mark.slow
def test_the_auc_of_visits_is_that_of_scikit_learn_on_the_predictions(tmp_path: Path) -> None:
    printed = ran("web_log", tmp_path)
    rows = pd.read_parquet(tmp_path / ".demo" / "web_log" / "predictions")
    auc = number(r"metric +auc (\S+)", printed)
    assert auc == pytest.approx(roc_auc_score(rows["label"], rows["prediction"]), abs=6e-5)
    assert auc > number(r"baseline +(\S+)", printed)
    assert number(r"highest, (\S+) of all", printed) == pytest.approx(rows["label"].mean(), abs=6e-3)


@pytest.mark.slow
def test_the_accuracy_on_class_folders_is_that_of_the_folders_names(tmp_path: Path) -> None:
    printed = ran("picture_folders", tmp_path)
    rows = pd.read_parquet(tmp_path / ".demo" / "picture_folders" / "predictions")
    folders = rows["file"].str.split("/").str[-2]
    assert (folders == rows["label_name"]).all() and len(rows) == 600
    accuracy = accuracy_score(folders, rows["class_name"])
    assert number(r"metric +accuracy (\S+)", printed) == pytest.approx(accuracy, abs=6e-5)
    assert number(r"(\d+) of 600 are wrong", printed) == round(600 * (1 - accuracy))
    train = {path.name: len([*path.iterdir()]) for path in below(tmp_path, "picture_folders/garments/train").iterdir()}
    frequent = max(train, key=train.__getitem__)
    assert number(r"baseline +(\S+)", printed) == pytest.approx((folders == frequent).mean(), abs=6e-5)


@pytest.mark.slow
def test_parquet_of_others_has_the_rows_that_pandas_reads_and_the_auc_of_scikit_learn(tmp_path: Path) -> None:
    import lockstep

    printed = ran("hive_parquet", tmp_path)
    files, run = tmp_path / ".demo" / "hive_parquet" / "visits", tmp_path / ".demo" / "hive_parquet" / "run"
    train, test = train_and_test(files)
    assert number(r"train: (\d+) records", printed) == len(train) and set(test["month"]) == {"2026-04"}
    outputs = lockstep.predict(str(run), test[["country", "device", "pages", "seconds"]])
    assert number(r"\nauc +(\S+)", printed) == pytest.approx(roc_auc_score(test["bought"], outputs.ravel()), abs=6e-5)
    rates = (train.groupby("country", observed=True)["bought"].sum() + 10 * train["bought"].mean()) / (
        train["country"].value_counts() + 10
    )
    baseline = roc_auc_score(test["bought"], test["country"].map(rates).astype(float))
    assert number(r"\nauc +\S+ +\S+ to \S+ +(\S+)", printed) == pytest.approx(baseline, abs=6e-5)


@pytest.mark.slow
def test_the_auc_of_clicks_is_that_of_scikit_learn_and_beats_a_category(tmp_path: Path) -> None:
    printed = ran("click_log", tmp_path)
    rows = pd.read_parquet(tmp_path / ".demo" / "click_log" / "predictions")
    auc = number(r"metric +auc (\S+)", printed)
    assert auc == pytest.approx(roc_auc_score(rows["label"], rows["prediction"]), abs=6e-5)
    lines = pd.read_csv(tmp_path / ".demo" / "click_log" / "clicks.tsv.gz", sep="\t", header=None)
    assert number(r"written +(\d+)", printed) == len(lines)
    assert auc > number(r"baseline +(\S+)", printed) + 0.05


@pytest.mark.slow
def test_a_keras_script_on_two_ranks_has_the_accuracy_of_plain_keras(tmp_path: Path) -> None:
    printed = ran("keras_script", tmp_path)
    plain, *ranks = (float(one) for one in re.findall(r"accuracy (0\.\d+)", printed))
    assert len(ranks) == 2 and ranks[0] == ranks[1] and abs(plain - ranks[0]) <= 0.003 and plain > 0.75
    changed = [line for line in printed.splitlines() if line.startswith("< ")]
    assert len(changed) == 4  # a docstring, this rank's rows, the optimizer, the batch: all else is only added


@pytest.mark.slow
def test_a_horovod_script_beats_the_most_frequent_class(tmp_path: Path) -> None:
    from sklearn.dummy import DummyClassifier

    from tests.lockstep.test_seeds import pictures

    printed = ran("horovod_script", tmp_path)
    images, labels = pictures("t10k", 2000)
    frequent = DummyClassifier().fit(images.reshape(2000, -1), labels).score(images.reshape(2000, -1), labels)
    assert number(r"alone (\S+)", printed) == pytest.approx(frequent, abs=6e-5)
    assert number(r"accuracy ([\d.]+)", printed) > frequent + 0.5
    folder = tmp_path / ".demo" / "horovod_script"
    curves = [pd.read_csv(folder / run / "log.csv").drop_duplicates("epoch") for run in ("peace", "killed")]
    assert list(curves[0]["epoch"]) == list(range(12)) and "start 2 of 2 follows: rank 1" in printed
    pd.testing.assert_frame_equal(curves[0], curves[1].reset_index(drop=True), check_exact=True)
    assert curves[0]["loss"].iloc[-1] < curves[0]["loss"].iloc[0] / 2


@pytest.mark.slow
def test_ddp_and_horovod_s_names_print_the_same_losses_and_accuracy(tmp_path: Path) -> None:
    printed = ran("pytorch_script", tmp_path)
    lines = [line for line in printed.splitlines() if "loss" in line or "accuracy" in line]
    assert len(lines) == 6 and lines[:3] == lines[3:]
    assert number(r"accuracy ([\d.]+)", printed) > 0.7


@pytest.mark.slow
def test_a_training_killed_three_times_ends_with_the_weights_of_one_in_peace(tmp_path: Path) -> None:
    printed = ran("recovery", tmp_path)
    ends = re.findall(r"last epoch: (.*)", printed)
    assert len(ends) == 3 and len({frozenset(end.split(", ")) for end in ends}) == 1  # the last is of the loop
    claims = sorted((tmp_path / ".demo" / "recovery" / "killed" / "generations").iterdir())
    assert len(claims) == 4  # the first start, and one after each kill


@pytest.mark.slow
def test_the_errors_of_a_recommender_are_those_of_scikit_learn(tmp_path: Path) -> None:
    import lockstep

    printed = ran("recommender", tmp_path)
    folder = tmp_path / ".demo" / "recommender"
    train, test = train_and_test(folder / "ratings")
    stars = lockstep.predict(str(folder / "run"), test[["user", "film"]]).ravel()
    error = root_mean_squared_error(test["rating"], stars)
    mean = root_mean_squared_error(test["rating"], [train["rating"].mean()] * len(test))
    assert number(r"\nrmse +(\S+)", printed) == pytest.approx(error, abs=6e-5)
    assert number(r"\nrmse +\S+ +(?:-|\S+ to \S+) +(\S+)", printed) == pytest.approx(mean, abs=6e-5)
    assert error < number(r"film: RMSE (\S+)", printed) < mean


@pytest.mark.slow
def test_hits_of_the_next_page_are_those_of_scikit_learn(tmp_path: Path) -> None:
    printed = ran("page_sequences", tmp_path)
    rows = pd.read_parquet(tmp_path / ".demo" / "page_sequences" / "predictions")
    hits = top_k_accuracy_score(rows["label"], [*rows["prediction"]], k=10, labels=range(100))
    assert number(r"\nhit@10 +(\S+)", printed) == pytest.approx(hits, abs=6e-5)
    assert number(r"right for (0\.\d+)", printed) == pytest.approx((rows["label"] == rows["class"]).mean(), abs=6e-4)
    train, test = train_and_test(tmp_path / ".demo" / "page_sequences" / "visits")
    frequent = test["next_page"].isin(train["next_page"].value_counts().index[:10]).mean()
    assert number(r"\nhit@10 +\S+ +- +(\S+)", printed) == pytest.approx(frequent, abs=6e-5)
    assert hits > frequent + 0.2


@pytest.mark.slow
def test_a_night_s_settings_are_those_that_the_dag_reads(tmp_path: Path) -> None:
    printed = ran("nightly", tmp_path)
    dag = (ROOT / "jobs" / "dags" / "lockstep_daily.py").read_text("utf-8")
    names = json.loads((EXAMPLES / "nightly" / "variables.json").read_text("utf-8"))
    assert [name for name in names if f'"{name.removeprefix("lockstep_weblog_")}": (' not in dag] == []
    assert {"upload", "etl", "verify", "train", "publish"} <= set(printed.splitlines())
