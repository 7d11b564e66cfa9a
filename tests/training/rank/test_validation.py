"""Validation in a run: what jobs.evaluate says of each checkpoint, and no trace of it in the training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import numpy_batches
from lockstep.storage.errors import ConfigError, LockstepError
from tests.training._fit_ranks import precision
from tests.training._threads import final_state, final_tensors, rows_of, run, run_threads
from tests.training._tiny import write_table
from training.config import TrainConfig
from training.driver.train import train
from training.launch.local import run_local
from training.reading.open import OpenSplit
from training.results.evaluate import evaluate
from training.run.metrics import read_history
from training.run.result import RunResult

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
TEST_ROWS = 1100  # three batches, of which the last is short: rank 0 of two has one


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 200, "test": TEST_ROWS})
    return str(folder)


def config(dataset: str, url: Path, num_ranks: int, model: str, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "epochs": 3, "seed": 7, "launcher": "local"} | more
    return TrainConfig(datasets=(dataset,), run=str(url), num_ranks=num_ranks, model=model, **options)


def evaluated(url: str, dataset: str, step: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """What jobs.evaluate says of the checkpoint of one step."""
    shutil.copytree(url, folder)
    shutil.rmtree(folder / "results")
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.split(".")[0].removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return evaluate(str(folder), dataset, "test", run_threads, num_ranks=num_ranks)


def assert_same_bits(one: str, other: str, ranks: int) -> None:
    for rank in range(ranks):
        mine, others = final_tensors(one, rank), final_tensors(other, rank)
        assert sorted(mine) == sorted(others)
        assert [name for name in mine if mine[name].tobytes() != others[name].tobytes()] == []


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
def test_each_validation_is_the_evaluation_of_its_checkpoint(data: str, tmp_path: Path, num_ranks: int) -> None:
    options: dict[str, Any] = {"keep_best": "val_loss:min", "keep_checkpoints": 9, "validate": "test"}
    done = run(config(data, tmp_path / "run", num_ranks, f"{OWN}:with_callbacks", **options))
    epochs = read_history(done.run).epochs
    assert [row["step"] for row in epochs] == [8, 16, 25]
    for row in epochs:
        found = evaluated(done.run, data, row["step"], num_ranks, tmp_path / str(row["step"]))
        validated = {name: value for name, value in row["metrics"].items() if name.startswith("val_")}
        assert validated == pytest.approx({f"val_{k}": v for k, v in found["metrics"].items()}, rel=1e-12, abs=0)
        assert row["validation"]["intervals"] == found["intervals"]
        assert row["validation"]["samples"] == found["samples"] == TEST_ROWS
        assert row["validation"]["class_counts"] == found["class_counts"]
        assert row["validation"]["seconds"] > 0
    assert done.metrics == epochs[-1]["metrics"] and done.validation_s > 0 and done.stopped_by is None
    times = read_history(done.run).times
    assert all(sum(row["validation_s"] for row in times if row["rank"] == rank) > 0 for rank in range(num_ranks))
    # The same training without it: dropout, batch statistics, seeds, callbacks and a layer that tests change.
    for name, more in (("with", {"validate": "test"}), ("without", {})):
        run(config(data, tmp_path / name, num_ranks, f"{OWN}:restless", **more))
    assert_same_bits(str(tmp_path / "with"), str(tmp_path / "without"), num_ranks)
    losses = [{s: r["loss"] for s, r in rows_of(str(tmp_path / name), "step").items()} for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == 25


@pytest.mark.soak
def test_plain_keras_finds_the_same(data: str, tmp_path: Path) -> None:
    """`fit(validation_data=)` on one process, with the batches of the run."""
    import keras

    from training.models import ModelOptions
    from training.models.logistic import logistic

    done = run(config(data, tmp_path / "run", 2, "logistic", validate="test", precision="float64"))
    split = OpenSplit.at(data, "test")
    table = split.reader.table
    held_out = split.encoder.encode(split.reader.read_all([table.run(i) for i in range(table.num_blocks)]))
    batches = list(numpy_batches(data, global_batch=24, epochs=3, seed=7))
    keras.utils.set_random_seed(7)
    with precision("float64"):
        model = logistic(split.encoder.signature, ModelOptions(seed=7))
        for row, start, stop in zip(read_history(done.run).epochs, (0, 8, 16), (8, 16, 25), strict=True):
            mine = batches[start:stop]
            history = model.fit(
                {name: np.concatenate([batch.x[name] for batch in mine]) for name in mine[0].x},
                np.concatenate([batch.y for batch in mine if batch.y is not None])[:, None],
                batch_size=24,
                shuffle=False,
                verbose=0,
                validation_data=(held_out.x, np.asarray(held_out.y)[:, None]),
                validation_batch_size=512,
            ).history
            for name in ("loss", "accuracy", "r2", "val_loss", "val_accuracy", "val_r2"):
                assert row["metrics"][name] == pytest.approx(history[name][0], rel=1e-6), name
            assert row["metrics"]["val_log_loss"] == pytest.approx(history["val_loss"][0], rel=1e-6)


def test_early_stop_and_max_steps_end_a_run_as_if_in_one_go(data: str, tmp_path: Path) -> None:
    """A rule that wants the loss to rise: its first value is never beaten."""
    rule = {"validate": "test", "validate_every": 2, "early_stop": "val_loss:max:2"}
    whole = run(config(data, tmp_path / "whole", 2, "logistic", epochs=12, **rule))
    # Validated after epochs 2, 4 and 6: the first is the best, the others are no better.
    assert whole.steps == 50 and [("val_loss" in r["metrics"]) for r in read_history(whole.run).epochs] == [0, 1] * 3
    reason = "--early-stop val_loss:max:2: no better val_loss in 2 validations (best "
    assert (whole.stopped_by or "").startswith(reason) and "in epoch 2)" in (whole.stopped_by or "")
    assert "ended early by --early-stop" in whole.summary()
    part = run(config(data, tmp_path / "parts", 2, "logistic", epochs=12, max_steps=20, **rule))
    assert (part.steps, part.stopped_by) == (20, "--max-steps 20")
    assert "val_loss" in part.metrics, "the last step is validated"
    again = config(data, tmp_path / "parts", 2, "logistic", epochs=12, max_steps=20, **rule)
    assert run(again).generation == part.generation, "it is complete"
    longer = run(config(data, tmp_path / "parts", 2, "logistic", epochs=12, max_steps=33, **rule))
    assert longer.steps == 33 and longer.generation == 2
    more = run(config(data, tmp_path / "whole", 2, "logistic", epochs=13, **rule))
    assert (more.steps, more.stopped_by) == (50, whole.stopped_by), "more epochs do not undo it"
    with pytest.raises(ConfigError, match="early_stop"):
        run(config(data, tmp_path / "whole", 2, "logistic", epochs=13, **(rule | {"early_stop": None})))
    for name, value in (("early_stop", "val_f1:max:1"), ("keep_best", "val_f1:max")):
        with pytest.raises(ConfigError, match="no metric `val_f1`") as caught:
            run(config(data, tmp_path / name, 1, "logistic", validate="test", **{name: value}))
        assert "val_average_precision:max" in caught.value.allowed


@pytest.mark.soak
def test_a_run_that_max_steps_cut_becomes_the_whole_run(data: str, tmp_path: Path) -> None:
    results: list[RunResult] = []
    for name, cuts in (("whole", [None]), ("cut", [5, 20, None])):
        results += [run(config(data, tmp_path / name, 2, f"{OWN}:with_dropout", max_steps=cut)) for cut in cuts]
    assert [result.steps for result in results] == [25, 5, 20, 25]
    weights = [final_tensors(str(tmp_path / name)) for name in ("whole", "cut")]
    different = [name for name in weights[0] if weights[0][name].tobytes() != weights[1][name].tobytes()]
    assert [name for name in different if not name.startswith("callbacks")] == []


def test_a_failure_in_a_validation_changes_no_log(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.scoring.score_split import score

    options: dict[str, Any] = {"validate": "test", "early_stop": "val_auc:max:9", "checkpoint_every": 7}
    whole = run(config(data, tmp_path / "whole", 2, f"{OWN}:watches_validation", **options))
    calls = [0, 0]

    def failing(model: Any, split: Any, signature: Any, comm: Any, *rest: Any, **more: Any) -> Any:
        calls[comm.rank] += 1
        if comm.rank == 1 and calls[1] == 2:
            raise LockstepError("told to fail")
        return score(model, split, signature, comm, *rest, **more)

    monkeypatch.setattr("training.rank.validation.score", failing)
    broken = run(config(data, tmp_path / "broken", 2, f"{OWN}:watches_validation", **options))
    assert (broken.restarts, whole.restarts) == (1, 0) and calls[1] == 4, "the second validation was made again"
    assert_same_runs(whole, broken)


def assert_same_runs(whole: RunResult, broken: RunResult) -> None:
    assert (whole.steps, whole.metrics) == (broken.steps, broken.metrics)
    assert_same_bits(whole.run, broken.run, 2)
    assert final_state(whole.run) == final_state(broken.run)
    logs = [
        [(row["step"], row["epoch"], row["metrics"]) for row in read_history(r.run).epochs] for r in (whole, broken)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 3
    assert all("val_auc" in metrics for _, _, metrics in logs[0])


@pytest.mark.soak
def test_a_process_that_is_killed_in_a_validation_changes_no_log(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name in ("whole", "killed"):
        if name == "killed":
            monkeypatch.setenv("KILL_ONCE", str(tmp_path / "marker"))
        options: dict[str, Any] = {"validate": "test", "checkpoint_every": 7}
        results.append(train(config(data, tmp_path / name, 2, f"{OWN}:killed_in_a_validation", **options), run_local))
    assert (tmp_path / "marker").exists() and [result.restarts for result in results] == [0, 1]
    assert_same_runs(*results)
