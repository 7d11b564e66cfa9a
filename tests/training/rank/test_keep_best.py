"""With --keep-best a run's model has the bits of its best checkpoint, as with Keras' restore_best_weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.data import numpy_batches
from lockstep.storage.errors import TrainingFailedError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig, options_in
from lockstep.training.models import ModelOptions
from lockstep.training.models.logistic import logistic
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.export_run import export_run
from lockstep.training.results.report import write_report
from lockstep.training.results.runs import read_runs
from lockstep.training.run.checkpoint import read_manifest
from lockstep.training.run.checkpoint_division import read_whole
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.run.run_json import read_run
from lockstep.training.run.weights_source import located
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate, predict
from tests.training import _models
from tests.training._threads import rows_of, run, run_threads
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
FALLS, RISES = (
    "val_loss:min",
    "val_loss:max",
)  # the loss falls: the best by the first is the last, by the second the first


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 192, "test": 60})  # epochs of 8 steps
    return str(folder)


def config(dataset: str, url: Path, num_ranks: int = 1, model: str = "logistic", **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "epochs": 4, "seed": 7, "launcher": "local", "validate": "test"}
    options |= {"datasets": (dataset,), "run": str(url), "num_ranks": num_ranks, "model": model} | more
    return TrainConfig(**options)


def model_weights(url: str) -> list[bytes]:
    """The weights of an exported model, in Keras' order."""
    own = {"Noise": _models.Noise}
    model = keras.models.load_model(Path(url, "model.keras"), custom_objects=own)
    return [np.asarray(value).tobytes() for value in model.get_weights()]


def checkpoint_weights(run_url: str, step: int) -> list[bytes]:
    """Those of a checkpoint of the run."""
    (url,) = Path(run_url, "checkpoints").glob(f"step-{step:010d}.*")
    tensors = read_whole(str(url), read_manifest(str(url)), ("weights",))
    return [tensors[name].tobytes() for name in sorted(tensors)]


def assert_model_is(done: RunResult, step: int) -> None:
    """The run's model has the weights of its checkpoint of this step, the best by its rule, and the result says so."""
    assert done.model is not None and done.best is not None and done.keep_best is not None
    assert model_weights(done.model) == checkpoint_weights(done.run, step), "models/ has other weights"
    manifest = json.loads(Path(done.model, "_manifest.json").read_text())
    assert done.best["step"] == step and done.best["checkpoint"] == manifest["checkpoint"]
    metric, _, way = done.keep_best.rpartition(":")
    rows = read_history(done.run).epochs
    values = {row["step"]: row["metrics"][metric] for row in rows if metric in row["metrics"]}
    best = min(values.values()) if way == "min" else max(values.values())
    assert done.best["value"] == values[step] == best and done.best["metrics"][metric] == best
    assert verify(done.run) == []


@pytest.mark.parametrize(
    ("rule", "epoch"),
    [
        pytest.param(RISES, 1, marks=pytest.mark.soak),
        pytest.param(FALLS, 4, marks=pytest.mark.soak),
        ("val_accuracy:max", None),  # in the middle
    ],
)
def test_the_model_is_the_one_that_plain_keras_restores(
    data: str, tmp_path: Path, rule: str, epoch: int | None
) -> None:
    """EarlyStopping(restore_best_weights=True) and ModelCheckpoint(save_best_only=True), over the same batches."""
    metric, _, way = rule.rpartition(":")
    rate = 3.0 if epoch is None else 0.05  # too high: the accuracy goes up and down
    done = run(config(data, tmp_path / "run", 2, keep_best=rule, keep_checkpoints=1, learning_rate=rate))
    batches = list(numpy_batches(data, global_batch=24, epochs=4, seed=7))
    split = OpenSplit.at(data, "test")
    held_out = split.encoder.encode(read_all(split.reader))
    keras.utils.set_random_seed(7)
    model = logistic(split.encoder.signature, ModelOptions(seed=7, learning_rate=rate))
    stops = keras.callbacks.EarlyStopping(monitor=metric, mode=way, patience=99, restore_best_weights=True)
    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor=metric, mode=way, save_best_only=True)
    model.fit(
        ((batch.x, np.asarray(batch.y)[:, None]) for batch in batches),
        validation_data=(held_out.x, np.asarray(held_out.y)[:, None]),
        callbacks=[stops, saves],
        epochs=4,
        steps_per_epoch=8,
        verbose=0,
    )
    assert done.best is not None and done.best["step"] == 8 * (stops.best_epoch + 1)
    assert epoch in (None, stops.best_epoch + 1)
    assert_model_is(done, done.best["step"])
    assert done.model is not None
    for mine, theirs, saved in zip(
        keras.models.load_model(Path(done.model, "model.keras")).get_weights(),
        model.get_weights(),
        keras.models.load_model(tmp_path / "best.keras").get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(theirs, saved)


def test_all_that_use_a_run_take_the_best_checkpoint(data: str, tmp_path: Path) -> None:
    done = run(config(data, tmp_path / "run", 2, keep_best=RISES))
    assert done.best is not None and (done.steps, done.best["step"]) == (32, 8)
    last = f"last {done.metrics['val_loss']:.6g} at step 32: --checkpoint last"
    assert done.best_words() == f"best val_loss {done.best['value']:.6g} at step 8: the model has these weights; {last}"

    def scored(checkpoint: Any) -> dict[str, Any]:
        return dict(evaluate(done.run, data, "test", run_threads, checkpoint=checkpoint)["metrics"])

    best = scored(None)
    assert best == scored("best") == scored(8) and best != scored("last") == scored(32)
    assert best["loss"] == pytest.approx(done.best["value"], rel=1e-6)
    assert export_run(done.run, str(tmp_path / "model"), run_threads).checkpoint.step == 8
    assert export_run(done.run, str(tmp_path / "last"), run_threads, checkpoint="last").checkpoint.step == 32
    assert model_weights(str(tmp_path / "model")) == checkpoint_weights(done.run, 8)
    assert model_weights(str(tmp_path / "last")) == checkpoint_weights(done.run, 32)
    assert predict(done.run, data, "test", str(tmp_path / "predicted"), run_threads).model == done.model
    page = Path(write_report(done.run)).read_text()
    assert "best val_loss" in page and done.best["checkpoint"] in page
    (listed,) = read_runs([done.run])
    assert listed.metrics["val_loss"] == done.best["value"], "a listing ranks runs by the models that they have"
    # Before a run has a model, its best checkpoint stands for it, also as the first weights of another.
    for folder in ("results", "models"):
        Path(done.run, folder).rename(tmp_path / folder)
    assert scored(None) == best and Path(located(done.run)).name == done.best["checkpoint"]


def test_the_best_model_survives_failures_and_other_numbers_of_ranks(data: str, tmp_path: Path) -> None:
    """The best checkpoint is of the first generation; the run goes on with other ranks, fails, and is stopped early."""
    rule: dict[str, Any] = {"keep_best": RISES, "keep_checkpoints": 1, "epochs": 9, "checkpoint_every": 3}
    rule |= {"early_stop": f"{RISES}:4"}
    name = f"{OWN}:with_callbacks"
    first = run(config(data, tmp_path / "run", 2, name, max_steps=13, **rule))
    assert_model_is(first, 8)
    _models.FAIL_AT.update(step=21)
    done = run(config(data, tmp_path / "run", 3, name, **rule))
    assert not _models.FAIL_AT and done.restarts == 1 and done.generation == 3
    assert (done.steps, str(done.stopped_by)[:12]) == (
        40,
        "--early-stop",
    ) and "weights of the last" not in done.summary()
    assert_model_is(done, 8)
    _models.FAIL_AT.update(step=35)
    with pytest.raises(TrainingFailedError):  # the driver ends too
        run(config(data, tmp_path / "killed", 1, name, max_restarts=0, **rule))
    assert_model_is(run(config(data, tmp_path / "killed", 1, name, **rule)), 8)


def test_averages_that_become_the_weights_are_not_the_best_checkpoint(data: str, tmp_path: Path) -> None:
    """With use_ema, Keras' restore_best_weights restores the weights of the epoch, also where it is the last one."""
    averaged = run(config(data, tmp_path / "averaged", 1, f"{OWN}:with_averages", epochs=2))
    assert averaged.model is not None and model_weights(averaged.model) != checkpoint_weights(averaged.run, 16)
    done = run(config(data, tmp_path / "run", 1, f"{OWN}:with_averages", epochs=2, keep_best=FALLS))
    assert_model_is(done, 16)
    assert done.best_words().endswith("at step 16, the last step: the model has these weights")


def test_a_damaged_best_checkpoint_is_refused_and_the_next_best_used(
    data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule: dict[str, Any] = {"keep_best": RISES, "keep_checkpoints": 9}
    run(config(data, tmp_path / "run", max_steps=25, **rule))
    (file,) = Path(tmp_path, "run").glob("checkpoints/step-0000000008.*/rank-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = run(config(data, tmp_path / "run", **rule))
    assert done.best is not None and done.best["step"] == 16 and "is refused, the next best is used" in caplog.text
    assert done.model is not None and model_weights(done.model) == checkpoint_weights(done.run, 16)


def test_what_a_run_is_judged_by_may_change_when_it_resumes(data: str, tmp_path: Path) -> None:
    """Every step has the bits of the run without; a finished run gets another model by another rule."""
    plain = {"validate": None, "epochs": 6}
    name = f"{OWN}:with_callbacks"
    whole = run(config(data, tmp_path / "whole", 2, name, **plain))
    run(config(data, tmp_path / "run", 2, name, max_steps=8, **plain))
    changed: dict[str, Any] = {
        "early_stop": f"{RISES}:1",
        "keep_best": RISES,
        "keep_checkpoints": 9,
        "stall_limit_s": 99.0,
    }
    stopped = run(config(data, tmp_path / "run", 2, name, epochs=6, **changed))
    assert (stopped.steps, str(stopped.stopped_by)[:12]) == (24, "--early-stop"), "judges from epoch 2 on"
    assert_model_is(stopped, 16)
    stored = options_in(read_run(filesystem(stopped.run), RunPaths(stopped.run))["config"])
    assert {key: stored[key] for key in changed} == changed and stored["validate"] == "test", "run.json has the newest"
    # More patience for the same metric goes on counting; another rule, or none, lets the run go on.
    patient = changed | {"early_stop": f"{RISES}:3"}
    longer = run(config(data, tmp_path / "run", 2, name, epochs=6, **patient))
    assert longer.steps == 40 and "no better val_loss in 3 validations" in str(longer.stopped_by)
    rest = run(config(data, tmp_path / "run", 2, name, epochs=6, keep_checkpoints=9))
    assert (rest.steps, rest.stopped_by, rest.best) == (48, None, None)
    assert checkpoint_weights(rest.run, 48) == checkpoint_weights(whole.run, 48)
    losses = [{step: row["loss"] for step, row in rows_of(each.run, "step").items()} for each in (rest, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 48
    assert rest.model is not None and model_weights(rest.model) == checkpoint_weights(rest.run, 48)
    # It is complete, so only the choice of the model is made again.
    best = run(config(data, tmp_path / "run", 2, name, epochs=6, keep_checkpoints=9, keep_best=FALLS))
    assert best.steps == 48 and best.generation == rest.generation + 1
    assert_model_is(best, best.best["step"] if best.best else 0)
    again = run(config(data, tmp_path / "run", 2, name, epochs=6, keep_checkpoints=9, keep_best=FALLS))
    assert again.generation == best.generation, "the same call ends at once"
