"""Validation in a run: what lockstep evaluate says of each checkpoint, and no trace of it in the training."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from lockstep.data import numpy_batches
from lockstep.features.images.decode_many import BadImageError
from lockstep.storage.errors import ConfigError, DataError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import train
from lockstep.training.launch.barrier import OnSpark
from lockstep.training.launch.local import run_local
from lockstep.training.launch.session import Launch
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.report import write_report
from lockstep.training.results.runs import listing, read_runs
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult, find_result
from lockstep.training.run.status import now_utc, read_status, words
from tests.builders.blocks import read_all
from tests.builders.evaluations import evaluate
from tests.training._fit_ranks import precision
from tests.training._ranks import HERE, rank_path
from tests.training._threads import final_state, final_tensors, rows_of, run, run_threads
from tests.training._tiny import write_files, write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
TEST_ROWS = 1100  # three batches, of which the last is short: rank 0 of two has one


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 200, "test": TEST_ROWS})
    return str(folder)


def config(dataset: str, url: Path, num_ranks: int, model: str, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "epochs": 3, "seed": 7, "launcher": "local"}
    options |= {"datasets": (dataset,), "run": str(url), "num_ranks": num_ranks, "model": model} | more
    return TrainConfig(**options)


def evaluated(url: str, dataset: str, step: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """What lockstep evaluate says of the checkpoint of one step."""
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
    for row in epochs[::2]:
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

    from lockstep.training.models import ModelOptions
    from lockstep.training.models.logistic import logistic

    done = run(config(data, tmp_path / "run", 2, "logistic", validate="test", precision="float64"))
    split = OpenSplit.at(data, "test")
    held_out = split.encoder.encode(read_all(split.reader))
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
    from tests.training._models import Tested

    rule = {"validate": "test", "validate_every": 2, "early_stop": "val_loss:max:2"}
    whole = run(config(data, tmp_path / "whole", 2, "logistic", epochs=12, **rule))
    # Validated after epochs 2, 4 and 6: the first is the best, the others are no better.
    assert whole.steps == 50 and [("val_loss" in r["metrics"]) for r in read_history(whole.run).epochs] == [0, 1] * 3
    reason = "--early-stop val_loss:max:2: no better val_loss in 2 validations (best "
    assert (whole.stopped_by or "").startswith(reason) and "in epoch 2)" in (whole.stopped_by or "")
    assert "ended early by --early-stop" in whole.summary() and "weights of the last step" in whole.summary()
    said = f"50 steps, 6 of 12 epochs, first step after {whole.first_step_s:.1f} s, then {whole.samples_per_s:.0f} "
    assert (whole.epochs, whole.epochs_asked) == (6, 12) and said in whole.summary(), "the result says 12 epochs"
    Tested.all.clear()
    part = run(config(data, tmp_path / "parts", 2, f"{OWN}:tested", epochs=12, max_steps=20, **rule))
    assert (part.steps, part.stopped_by) == (20, "--max-steps 20")
    assert "left over" not in whole.summary() + part.summary(), "they were not used, and may be"
    assert part.epochs == 20 * 24 / 200 and "20 steps, 2.40 of 12 epochs, " in part.summary()
    assert find_result(filesystem(part.run), RunPaths(part.run))["epochs"] == 2.4  # type: ignore[index]
    assert "finished, step 20 of 20 (100%), 2.40 of 12 epochs" in shown_status(part.run)
    row = dict(zip(*listing(read_runs([part.run])), strict=True))
    assert (row["step"], row["epochs"]) == ("20 of 20", "2.40 of 12")
    assert "<td>2.40 of 12</td>" in Path(write_report(part.run)).read_text()
    assert "val_loss" in part.metrics, "the last step is validated"
    assert_hooks(part.run, Tested.all)
    again = config(data, tmp_path / "parts", 2, f"{OWN}:tested", epochs=12, max_steps=20, **rule)
    assert run(again).generation == part.generation, "it is complete"
    longer = run(config(data, tmp_path / "parts", 2, f"{OWN}:tested", epochs=12, max_steps=33, **rule))
    assert longer.steps == 33 and longer.generation == 2
    rest = run(config(data, tmp_path / "parts", 2, f"{OWN}:tested", epochs=12, **rule))
    assert (rest.steps, rest.stopped_by) == (50, whole.stopped_by), "what was validated at a cut is not judged"
    rows = [[(row["step"], row["epoch"], row["metrics"]) for row in read_history(r.run).epochs] for r in (whole, rest)]
    assert rows[0] == rows[1]
    more = run(config(data, tmp_path / "whole", 2, "logistic", epochs=13, **rule))
    assert (more.steps, more.stopped_by) == (50, whole.stopped_by), "more epochs do not undo it"
    for name, value in (("early_stop", "val_f1:max:1"), ("keep_best", "val_f1:max")):
        with pytest.raises(ConfigError, match="no metric `val_f1`") as caught:
            run(config(data, tmp_path / name, 1, "logistic", validate="test", **{name: value}))
        assert "val_average_precision:max" in caught.value.allowed


def shown_status(url: str) -> str:
    """What lockstep status prints."""
    return words(read_status(filesystem(url), RunPaths(url)), url, now_utc())


def assert_hooks(url: str, callbacks: list[Any]) -> None:
    """Each rank's callbacks were called as by Keras: its batches, then the metrics over all ranks, then the epoch's."""
    assert len(callbacks) == 2
    rows = read_history(url).epochs
    for batches, callback in zip((1, 2), callbacks, strict=True):  # of TEST_ROWS
        expected: list[tuple[str, int]] = []
        for row in rows:
            if "validation" in row:
                each = [(name, batch) for batch in range(batches) for name in ("batch begins", "batch ends")]
                expected += [("test begins", 0), *each, ("test ends", 0)]
            expected.append(("epoch ends", row["epoch"]))
        assert [event[:2] for event in callback.events] == expected
        validated = [
            {n: v for n, v in row["metrics"].items() if n[:4] == "val_"} for row in rows if "validation" in row
        ]
        ends = [logs for name, _, logs in callback.events if name == "test ends"]
        assert [{f"val_{name}": value for name, value in logs.items()} for logs in ends] == validated
        assert all("loss" in logs for name, _, logs in callback.events if name == "batch ends")


def test_bad_images_are_left_out_counted_and_named(tmp_path: Path) -> None:
    """The numbers are those of a split without them, also where no image of a batch is left."""
    bad = {3: b"", 55: b"no image", **dict.fromkeys(range(74, 80), b"")}
    write_files(tmp_path / "data", bad, records={"train": 50, "test": 30})
    more: dict[str, Any] = {"global_batch": 16, "epochs": 1, "extra": {"width": 4}, "validate": "test"}
    done = run(config(str(tmp_path / "data"), tmp_path / "run", 2, "mlp", bad_images="skip", **more))
    (row,) = read_history(done.run).epochs
    left_out = row["validation"]["left_out"]
    assert (row["validation"]["samples"], left_out["samples"], len(left_out["first"])) == (23, 7, 7)
    assert re.search(r"sample id 0{14}37, .*part-00000\.tfrecord, record 5 .*no_format|unknown", left_out["first"][0])
    write_files(tmp_path / "clean", {}, records={"train": 50, "test": 23}, without=[n for n in bad if n >= 50])
    clean = evaluate(done.run, str(tmp_path / "clean"), "test", run_threads)
    found = evaluate(done.run, str(tmp_path / "data"), "test", run_threads, num_ranks=2, batch=8, slices=["label"])
    assert found["left_out"] == left_out and clean["left_out"] == {"samples": 0, "first": []}
    assert found["samples"] == clean["samples"] == 23 == sum(each["samples"] for each in found["slices"]["label"])
    assert found["metrics"] == pytest.approx(clean["metrics"], rel=1e-6)
    validated = {name.removeprefix("val_"): value for name, value in row["metrics"].items() if name[:4] == "val_"}
    assert validated == pytest.approx(clean["metrics"], rel=1e-6)
    assert "rows left out of validation" in Path(write_report(done.run)).read_text()
    write_files(tmp_path / "none", dict.fromkeys(range(2, 6), b""), records={"train": 2, "test": 4})
    with pytest.raises(DataError, match="no row of split `test` can be decoded"):
        evaluate(done.run, str(tmp_path / "none"), "test", run_threads, num_ranks=2, batch=2)
    with pytest.raises(BadImageError, match="part-00000"):
        run(config(str(tmp_path / "data"), tmp_path / "refused", 2, "mlp", **more))


@pytest.mark.soak
def test_a_run_that_max_steps_cut_becomes_the_whole_run(data: str, tmp_path: Path) -> None:
    results: list[RunResult] = []
    for name, cuts in (("whole", [None]), ("cut", [5, 20, None])):
        results += [run(config(data, tmp_path / name, 2, f"{OWN}:with_dropout", max_steps=cut)) for cut in cuts]
    assert [result.steps for result in results] == [25, 5, 20, 25]
    assert [row["step"] for row in read_history(results[-1].run).epochs] == [8, 16, 25]
    weights = [final_tensors(str(tmp_path / name)) for name in ("whole", "cut")]
    different = [name for name in weights[0] if weights[0][name].tobytes() != weights[1][name].tobytes()]
    assert [name for name in different if not name.startswith("callbacks")] == []


def test_a_failure_in_a_validation_changes_no_log(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.training.scoring.score_split import Scorer

    """Of a mixture, whose test splits are scored end to end."""
    write_table(tmp_path / "more", records={"train": 200, "test": 50}, seed=1)
    options: dict[str, Any] = {"validate": "test", "early_stop": "val_auc:max:9", "checkpoint_every": 7}
    options |= {"datasets": (data, str(tmp_path / "more")), "mix": (1, 1), "global_batch": 32}
    whole = run(config(data, tmp_path / "whole", 2, f"{OWN}:watches_validation", **options))
    assert {row["validation"]["samples"] for row in read_history(whole.run).epochs} == {TEST_ROWS + 50}
    calls = [0, 0]

    score = Scorer.score

    def failing(scorer: Scorer, *rest: Any, **more: Any) -> Any:
        calls[scorer.comm.rank] += 1
        if scorer.comm.rank == 1 and calls[1] == 2:
            raise LockstepError("told to fail")
        return score(scorer, *rest, **more)

    monkeypatch.setattr(Scorer, "score", failing)
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
def test_a_process_of_a_barrier_stage_that_is_killed_in_a_validation_changes_no_log(
    data: str, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_path(monkeypatch)
    spark.sparkContext.addPyFile(str(Path(HERE, "_models.py")))
    results = []
    launches: dict[str, Launch] = {"whole": run_local, "killed": OnSpark(spark)}
    for name, launch in launches.items():
        options: dict[str, Any] = {"validate": "test", "checkpoint_every": 7}
        options["extra"] = {"kill_once": str(tmp_path / "marker")} if name == "killed" else {}
        results.append(train(config(data, tmp_path / name, 2, "_models:killed_in_a_validation", **options), launch))
    assert (tmp_path / "marker").exists() and [result.restarts for result in results] == [0, 1]
    assert_same_runs(*results)


def test_a_long_validation_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes another phase, or another step, as progress."""
    from lockstep.training.rank import validation

    class Control:
        phases: ClassVar[list[tuple[int, str]]] = []

        def beat(self, step: int, phase: str) -> None:
            self.phases.append((step, phase))

    control: Any = Control()
    monkeypatch.setattr(validation, "BEAT_EVERY_S", 0.0)
    beat = validation.Beats(control, 7)
    for batch in range(3):
        beat(batch, "evaluate")
    assert {step for step, _ in control.phases} == {7} and len({phase for _, phase in control.phases}) == 4
    monkeypatch.setattr(validation, "BEAT_EVERY_S", 60.0)
    beat(3, "evaluate")
    assert len(control.phases) == 4, "each is a message"
