"""Cross-validation: which runs it makes, its averages, and that an interrupted one ends with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

from lockstep.jobs.cross_validate import main, parser
from lockstep.storage.documents import unseal_as
from lockstep.storage.errors import ConfigError, CorruptionError
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import RankTask
from lockstep.training.driver.train import Hooks
from lockstep.training.search.folds import cross_validate, over_folds, runs_of_folds, summary
from tests.builders.evaluations import evaluate, predict
from tests.training._threads import run_threads
from tests.training._tiny import write_table

FOLDS = {"fold-0": 40, "fold-1": 30}


def config_of(folder: Path, **more: Any) -> TrainConfig:
    common: dict[str, Any] = {"num_ranks": 1, "global_batch": 16, "epochs": 2, "launcher": "local", "model": "logistic"}
    return TrainConfig(**{"datasets": (str(folder / "data"),), "run": str(folder / "cv"), **common, **more})


def test_each_fold_is_held_out_of_one_run(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={f"fold-{number}": 20 for number in range(11)})
    runs = runs_of_folds(config_of(tmp_path, early_stop="loss:min:3"))
    assert {run.validation.early_stop for run in runs.values()} == {"loss:min:3"}
    assert list(runs) == [f"fold-{number}" for number in range(11)], "in the order of their numbers"
    for held_out, run in runs.items():
        assert run.run == str(tmp_path / "cv" / held_out)
        assert sorted(run.data.split.split(",")) == sorted({*runs} - {held_out})
    assert not (tmp_path / "cv").exists()


def test_what_is_no_set_of_folds_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match="dataset of a cross-validation") as caught:
        runs_of_folds(config_of(tmp_path))
    assert caught.value.got == "splits test, train" and "--split kfold:5" in caught.value.next_step
    with pytest.raises(ConfigError, match="dataset of a cross-validation"):
        runs_of_folds(config_of(tmp_path, datasets=("a", "b")))
    write_table(tmp_path / "folds", records=FOLDS)
    folds = {"datasets": (str(tmp_path / "folds"),)}
    with pytest.raises(ConfigError, match="10 ranks are more"):
        runs_of_folds(config_of(tmp_path, num_ranks=10, **folds))
    (tmp_path / "cv").mkdir()
    for name in ("run.json", "fold-2"):
        (tmp_path / "cv" / name).mkdir()
        with pytest.raises(ConfigError, match="not the cross-validation of these folds") as caught:
            runs_of_folds(config_of(tmp_path, **folds))
        assert caught.value.got == f"a directory with {name}"
        (tmp_path / "cv" / name).rmdir()


def test_the_job_has_the_flags_of_a_run_but_no_split(tmp_path: Path) -> None:
    flags = ["--dataset", str(tmp_path / "data"), "--run", str(tmp_path / "cv"), "--num-ranks", "1"]
    flags += ["--global-batch", "16", "--epochs", "1"]
    assert parser().parse([*flags, "--model", "logistic"]).run == str(tmp_path / "cv")
    for more, named in ((("--model", "logstic"), "Did you mean"), (("--model", "logistic", "--split", "a"), "--split")):
        with pytest.raises(ConfigError, match=named):
            main([*flags, *more])
    assert "--validate SPLIT" not in parser().format_help()
    for validate in ("fold-0", "test"):
        with pytest.raises(ConfigError, match="`validate` of a cross-validation") as caught:
            main([*flags, "--model", "logistic", "--validate", validate])
        assert "would flatter its evaluation" in caught.value.allowed
    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match="dataset of a cross-validation"):  # before Spark is asked for its master
        main([*flags, "--model", "logistic", "--master", "nowhere"])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_mean_and_standard_deviation_are_those_of_numpy(values: list[float]) -> None:
    found = over_folds([{"auc": value, "name": "x"} for value in values])
    assert found["auc"]["n"] == len(values) and found["name"] == {"mean": None, "std": None, "n": 0}
    assert found["auc"]["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert found["auc"]["std"] == pytest.approx(np.std(values, ddof=1), rel=1e-9, abs=1e-6)


def test_folds_without_a_metric_are_left_out_and_counted() -> None:
    metrics: list[dict[str, Any]] = [{"auc": 0.5, "loss": 1.0}, {"auc": None, "loss": "nan"}, {"auc": 0.7}]
    found = over_folds(metrics)
    assert found["auc"] == {"mean": 0.6, "std": pytest.approx(0.02**0.5), "n": 2}
    assert found["loss"] == {"mean": 1.0, "std": None, "n": 1}
    folds = [{"fold": f"fold-{n}", "samples": 10, "metrics": each} for n, each in enumerate(metrics)]
    pooled = {"samples": 30, "metrics": {"auc": 0.61}, "intervals": {"auc": [0.5, 0.7]}}
    about = {"dataset": "/x/data", "model": "logistic", "folds": folds, "metrics": found, "pooled": pooled}
    assert summary(about).splitlines() == [
        "3 folds of data, model logistic: 30 samples",
        "metric  all rows  95 % interval     mean    std     fold-0  fold-1  fold-2",
        "auc     0.6100    0.5000 to 0.7000  0.6000  0.1414  0.5000  -       0.7000",
        "loss    -         -                 1.0000  -       1.0000  nan     -",
    ]


def assert_pooled(result: dict[str, Any], folder: Path) -> None:
    """All held-out predictions together have scikit-learn's metrics; the mean of the folds' is another number."""
    tables = []
    for fold in FOLDS:
        output = str(folder / f"predicted-{fold}")
        predict(str(folder / "cv" / fold), str(folder / "data"), fold, output, run_threads)
        tables.append(ds.dataset(output, exclude_invalid_files=True).to_table())
    rows = pa.concat_tables(tables).to_pydict()
    labels, predicted = np.array(rows["label"]), np.array(rows["prediction"])
    expected = {
        "auc": roc_auc_score(labels, predicted),
        "average_precision": average_precision_score(labels, predicted),
        "accuracy": accuracy_score(labels, predicted > 0.5),
        "log_loss": log_loss(labels, predicted),
    }
    pooled = result["pooled"]
    assert pooled["samples"] == sum(FOLDS.values()) == len(labels)
    assert {name: pooled["metrics"][name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert pooled["metrics"]["auc"] != result["metrics"]["auc"]["mean"]
    low, high = pooled["intervals"]["auc"]
    assert low < pooled["metrics"]["auc"] < high


class Interrupted(Exception):
    """In place of a kill."""


class Launches:
    """Ranks as threads; the launch of number `fail_at` is interrupted."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at, self.entries = fail_at, list[str]()

    def __call__(self, task: RankTask, num_ranks: int, **more: Any) -> list[dict[str, Any]]:
        if len(self.entries) == self.fail_at:
            raise Interrupted
        self.entries.append(task.entry.split(":")[0].split(".")[2])
        return run_threads(task, num_ranks, **more)


@pytest.mark.slow
def test_the_same_call_resumes_at_the_fold_that_was_interrupted(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records=FOLDS)
    config, hooks = config_of(tmp_path), Hooks(lease_watch_s=0.1)
    first, second, third = Launches(3), Launches(), Launches()
    with pytest.raises(Interrupted):  # in the evaluation of fold-1
        cross_validate(config, first, hooks=hooks)
    assert first.entries == ["rank", "results", "rank"] and not (tmp_path / "cv" / "result.json").exists()
    result = cross_validate(config, second, hooks=hooks)
    assert second.entries == ["results"] * 2, "the fold, then all held-out rows"
    assert_pooled(result, tmp_path)
    assert [(fold["fold"], fold["samples"]) for fold in result["folds"]] == list(FOLDS.items())
    stored = (tmp_path / "cv" / "result.json").read_bytes()
    assert unseal_as("cross_validation", stored, "result.json") == result
    assert cross_validate(config, third, hooks=hooks) == result and not third.entries
    assert (tmp_path / "cv" / "result.json").read_bytes() == stored
    (tmp_path / "cv" / "fold-0.json").write_bytes(b"{")
    with pytest.raises(CorruptionError, match=r"fold-0\.json") as caught:
        cross_validate(config, third, hooks=hooks)
    assert caught.value.next_step.startswith("Delete this file") and not third.entries
    (tmp_path / "cv" / "fold-0.json").unlink()
    assert cross_validate(config, third, hooks=hooks) == result and third.entries == ["results"]
    # Each fold is an ordinary run, and its numbers are those of lockstep evaluate on the fold held out.
    single = evaluate(str(tmp_path / "cv" / "fold-1"), str(tmp_path / "data"), "fold-1", run_threads)
    assert result["folds"][1]["metrics"] == single["metrics"]
    with pytest.raises(ConfigError, match="begun with another `learning_rate`"):
        cross_validate(config_of(tmp_path, learning_rate=0.5), Launches(), hooks=hooks)
    longer, launches = config_of(tmp_path, epochs=3), Launches()
    again = cross_validate(longer, launches, hooks=hooks)
    assert launches.entries == [*["rank", "results"] * 2, "results"], "a longer run is evaluated again"
    assert again["pooled"]["metrics"] != result["pooled"]["metrics"]
    assert again["metrics"]["loss"]["mean"] != result["metrics"]["loss"]["mean"]
