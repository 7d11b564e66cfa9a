"""Whole runs: the same model at any number of ranks, and after a restart in the middle of an epoch."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.features.sample_id import sample_id
from lockstep.storage.errors import ConfigError, CorruptionError, DataError, LockstepError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.batches.audit_log import sample_hex
from lockstep.training.config import TrainConfig
from lockstep.training.driver.stop import EXIT_STOPPED
from lockstep.training.driver.train import Hooks
from lockstep.training.exchange.agreement import NonFiniteError
from lockstep.training.rank.checkpointing import Schedule
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.checkpoint import upload
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from tests.builders.evaluations import evaluate
from tests.training._threads import LEAVE_AFTER, final_state, final_tensors, rows_of, run, run_threads
from tests.training._tiny import write_images, write_table

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    write_table(folder / "table", records={"train": 200, "test": 30})
    write_images(folder / "images", records={"train": 400, "test": 30})
    return {"table": str(folder / "table"), "images": str(folder / "images")}


def train(dataset: str, url: Path, num_ranks: int, model: str, *, hooks: Hooks | None = None, **more: Any) -> RunResult:
    defaults: dict[str, Any] = {
        "global_batch": 24,
        "epochs": 6,
        "checkpoint_every": 1000,
        "launcher": "local",
        "seed": 7,
    }
    config = TrainConfig(datasets=(dataset,), run=str(url), num_ranks=num_ranks, model=model, **(defaults | more))
    return run(config, hooks)


def assert_same(mine: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The project's measure: max|a - b| <= 1e-9 * max(max|a|, 1e-3) for each tensor."""
    mine, other = ({k: v for k, v in t.items() if k.split("/")[0] in ("weights", "optimizer")} for t in (mine, other))
    assert set(mine) == set(other)
    for name, value in mine.items():
        worst = float(np.max(np.abs(value.astype(np.float64) - other[name]), initial=0.0))
        assert worst <= 1e-9 * max(float(np.max(np.abs(value), initial=0.0)), 1e-3), (name, worst)


def assert_same_result(mine: RunResult, other: RunResult) -> None:
    assert mine.left_over == other.left_over
    for name, value in mine.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-9), name


def test_n_ranks_are_one_rank_in_float64(data: dict[str, str], tmp_path: Path) -> None:
    """8 lane groups on 3 ranks: 2, 3 and 3, so shares are uneven; batch statistics by ghost groups. Images are
    augmented, and mixed within lanes of 3 rows, so labels are shares of classes.
    """
    changes = {"lanes": 8, "augment": "crop:1:reflect flip rotate:5 mixup:0.2"}
    options: dict[str, Any] = {"precision": "float64", "learning_rate": 0.05, "epochs": 3, **changes}
    alone = train(data["images"], tmp_path / "one", 1, "resnet8", **options)
    together = train(data["images"], tmp_path / "many", 3, "resnet8", **options)
    assert alone.steps == together.steps == 50
    mine, other = final_tensors(str(tmp_path / "one")), final_tensors(str(tmp_path / "many"))
    assert {value.dtype.name for name, value in mine.items() if name.startswith("weights")} == {"float64"}
    assert_same(mine, other)
    assert_same_result(alone, together)
    found = evaluate(str(tmp_path / "one"), data["images"], "test", run_threads, num_ranks=2, baseline="majority")
    of_baseline = {"accuracy", "log_loss", "loss_without_regularisation"}  # with it a loss is the model's own
    assert found["samples"] == 30 and set(found["baseline"]["metrics"]) == of_baseline
    assert set(found["metrics"]) == {"loss", *of_baseline}


def test_losses_of_each_step_in_float32(data: dict[str, str], tmp_path: Path) -> None:
    for ranks, every in ((1, "auto"), (2, "0.2s")):
        more: dict[str, Any] = {"learning_rate": 0.05, "epochs": 3, "checkpoint_every": every}
        train(data["images"], tmp_path / str(ranks), ranks, "resnet8", **more)
    alone, together = (rows_of(str(tmp_path / str(ranks)), "step") for ranks in (1, 2))
    assert sorted(alone) == sorted(together) == list(range(1, 51))
    losses = [np.array([rows[step]["loss"] for step in sorted(rows)]) for rows in (alone, together)]
    assert np.max(np.abs(losses[0] - losses[1])) <= 1e-4
    assert losses[0][-1] < 0.5 * losses[0][0], "it learns"
    *_, last = read_history(str(tmp_path / "1")).checkpoints  # the only one, unless the run takes half a minute
    assert last["step"] == 50 and last["interval_s"] > 0
    by_clock = read_history(str(tmp_path / "2")).checkpoints
    assert {row["interval_s"] for row in by_clock} == {0.2} and by_clock[0]["step"] < by_clock[-1]["step"] == 50
    times = read_history(str(tmp_path / "2")).times
    assert {row["rank"] for row in times} == {0, 1}
    assert {sum(row["steps"] for row in times if row["rank"] == rank) for rank in (0, 1)} == {50}
    assert all(row["compute_s"] + row["starting_s"] > 0 for row in times) and any(
        row["checkpoint_s"] > 0 for row in times
    )


@pytest.fixture(scope="module")
def undisturbed(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """200 samples, batches of 24: 8 or 9 steps an epoch, 50 in all."""
    url = tmp_path_factory.mktemp("undisturbed") / "run"
    return url, train(data["table"], url, 2, f"{OWN}:with_callbacks", checkpoint_every=15, audit=True)


def assert_no_bit_differs(one: tuple[Path, RunResult], other: tuple[Path, RunResult]) -> None:
    (whole_url, whole), (broken_url, broken) = one, other
    assert (whole.steps, whole.metrics) == (broken.steps, broken.metrics)
    for rank in (0, 1):  # weights, optimizer, dropout's seeds, EarlyStopping's best weights
        mine, others = final_tensors(str(whole_url), rank), final_tensors(str(broken_url), rank)
        assert sorted(mine) == sorted(others)
        assert all(mine[name].tobytes() == others[name].tobytes() for name in mine)
    assert final_state(str(whole_url)) == final_state(str(broken_url))
    losses = [{s: r["loss"] for s, r in rows_of(str(url), "step").items()} for url in (whole_url, broken_url)]
    assert losses[0] == losses[1]
    assert class_counts(whole_url) == class_counts(broken_url) and broken.class_counts == whole.class_counts


def class_counts(url: Path) -> list[list[int] | None]:
    """The rows of each class in each epoch; None in a run that counts none, as one of several tasks."""
    return [row.get("class_counts") for row in read_history(str(url)).epochs]


def test_class_counts_are_of_whole_epochs(undisturbed: tuple[Path, RunResult]) -> None:
    """The tests below compare those of a run that was cut with these."""
    assert all(counts and sum(counts) in (192, 216) for counts in class_counts(undisturbed[0]))


def test_a_restart_in_the_middle_of_an_epoch_changes_no_bit(
    data: dict[str, str], undisturbed: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """The checkpoint of step 30 lies within the fourth epoch."""
    from tests.training import _models  # imports TensorFlow

    _models.FAIL_AT.update(step=37)
    broken = train(data["table"], tmp_path, 2, f"{OWN}:with_callbacks", checkpoint_every=15, audit=True)
    assert not _models.FAIL_AT, "it did fail"
    url, whole = undisturbed
    assert (broken.restarts, whole.restarts, broken.steps) == (1, 0, 50)
    assert_no_bit_differs(undisturbed, (tmp_path, broken))
    seeds = [[v.tobytes() for n, v in final_tensors(str(url), r).items() if n.startswith("seeds/")] for r in (0, 1)]
    assert seeds[0] and seeds[0] != seeds[1], "each rank has dropout masks of its own"
    plateau = next(c["state"] for c in final_state(str(url))["callbacks"] if c["class"] == "ReduceLROnPlateau")
    assert plateau["best"] is not None
    assert whole.metrics["learning_rate"] < 0.001, "ReduceLROnPlateau has acted, so its state counts"


def test_ranks_that_are_asked_leave_after_one_step_and_change_no_bit(
    data: dict[str, str], undisturbed: tuple[Path, RunResult], tmp_path: Path
) -> None:
    """In the middle of an epoch, after its last step, and asked before its last step (step 25)."""
    LEAVE_AFTER.update(dict.fromkeys((12, 16, 24), lambda: None))
    options: dict[str, Any] = {"checkpoint_every": 1000, "audit": True}
    for left in (13, 16, 25):
        with pytest.raises(SystemExit) as caught:
            train(data["table"], tmp_path, 2, f"{OWN}:with_callbacks", **options)
        assert caught.value.code == EXIT_STOPPED
        tip = find_tip(filesystem(str(tmp_path)), RunPaths(str(tmp_path)))
        assert tip is not None and tip.ref.step == left
    last = train(data["table"], tmp_path, 2, f"{OWN}:with_callbacks", **options)
    assert not LEAVE_AFTER
    assert_no_bit_differs(undisturbed, (tmp_path, last))
    assert check_run_audit(str(tmp_path)).ok and verify(str(tmp_path)) == []


def test_a_checkpoint_that_fails_at_any_moment_loses_nothing(
    data: dict[str, str], undisturbed: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copy, in the writing, between report and rename; then storage so slow that some are skipped."""
    from lockstep.training.rank.saver import Saver  # imports TensorFlow

    pending, save = ["copy", "write", "rename"], Saver.save
    skipped, skip = threading.Event(), Schedule.skipped

    def fails(moment: str) -> None:
        if pending[:1] == [moment]:
            pending.pop(0)
            raise LockstepError(f"broken at `{moment}`")

    def failing_save(saver: Any, progress: Any, **more: Any) -> None:
        if saver._context.world.rank == 1:
            fails("copy")
        save(saver, progress, **more)

    def slow_upload(fs: Any, url: str, file: Any) -> None:
        if "rank-00001" in url:
            fails("write")
            assert pending or skipped.wait(240), "none has fallen due while this one is in flight"
        upload(fs, url, file)

    def told_skip(schedule: Schedule) -> None:
        skip(schedule)
        skipped.set()

    monkeypatch.setattr(Saver, "save", failing_save)
    monkeypatch.setattr("lockstep.training.rank.saver.upload", slow_upload)
    monkeypatch.setattr(Schedule, "skipped", told_skip)
    hooks = Hooks(lease_watch_s=0.1, before_rename=lambda: fails("rename"))
    options: dict[str, Any] = {"checkpoint_every": 3, "audit": True, "max_restarts": 9}
    broken = train(data["table"], tmp_path, 2, f"{OWN}:with_callbacks", hooks=hooks, **options)
    assert (broken.restarts, pending) == (3, [])
    assert_no_bit_differs(undisturbed, (tmp_path, broken))
    assert check_run_audit(str(tmp_path)).ok
    assert verify(str(tmp_path)) == []
    told = read_history(str(tmp_path)).checkpoints
    assert told[-1]["step"] == broken.steps and sum(row["skipped"] for row in told) > 0
    assert all(0 < row["blocked_s"] <= row["cost_s"] + 1e-6 and row["written_s"] > 0 for row in told)


def test_other_ranks_go_on_with_a_run(data: dict[str, str], tmp_path: Path) -> None:
    """More epochs and other ranks, of a table, from the middle of an epoch: float64, so that the order of sums does not
    count.
    """
    straight = train(data["table"], tmp_path / "a", 1, "logistic", precision="float64", epochs=5)
    train(data["table"], tmp_path / "b", 3, "logistic", precision="float64", epochs=2, max_steps=12)
    later = train(data["table"], tmp_path / "b", 2, "logistic", precision="float64", epochs=5)
    assert later.steps == straight.steps == 41
    assert_same(final_tensors(str(tmp_path / "a")), final_tensors(str(tmp_path / "b")))
    assert_same_result(straight, later)
    assert class_counts(tmp_path / "a") == class_counts(tmp_path / "b")


def test_a_loss_that_is_not_finite_stops_all_ranks_at_the_same_step(data: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"step \d+: .* is not finite") as caught:
        train(data["table"], tmp_path / "run", 2, f"{OWN}:diverging")
    assert "none has applied it" in str(caught.value)
    assert rows_of(str(tmp_path / "run"), "step").keys() <= set(range(1, 10))


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_its_samples_are_told(tmp_path: Path) -> None:
    """Row 123 has no number: each epoch's step with it leaves no trace in weights, Adam or metrics, at any N."""
    write_table(tmp_path / "data", records={"train": 200, "test": 30}, nan_rows=[123])
    bad = sample_hex(sample_id([b"123"], 0))
    options: dict[str, Any] = {"audit": True, "precision": "float64", "epochs": 3, "checkpoint_every": 7}
    with pytest.raises(NonFiniteError) as caught:
        train(str(tmp_path / "data"), tmp_path / "stop", 2, "logistic", **options)
    (row,) = read_history(str(tmp_path / "stop")).non_finite
    assert bad in row["samples"] and len(row["samples"]) == 12 and not row["skipped"]
    assert f"rank {row['rank']}: the loss, the gradient of" in str(caught.value)
    assert f"of lanes {row['lanes'][0]} to {row['lanes'][1]}, samples {row['samples'][0]}" in str(caught.value)
    assert f"step {row['step']}: " in str(caught.value) and row["what"][0] == "the loss"
    results = []
    for ranks in (1, 2):
        url = str(tmp_path / str(ranks))
        results.append(
            train(str(tmp_path / "data"), tmp_path / str(ranks), ranks, "logistic", **options, non_finite="skip")
        )
        rows = read_history(url).non_finite
        assert len(rows) == 3 and all(bad in row["samples"] and row["skipped"] for row in rows)
        assert {row["step"] for row in rows} == {
            step for step, row in rows_of(url, "step").items() if row.get("skipped")
        }
        assert [row.get("skipped") for row in read_history(url).epochs] == [1, 1, 1]
        iterations = next(v for n, v in final_tensors(url).items() if n.endswith("/iteration"))
        assert iterations == results[-1].steps - 3
    assert_same_result(*results)
    assert all(np.isfinite(value) for value in results[0].metrics.values())
    assert_same(*(final_tensors(str(tmp_path / str(ranks))) for ranks in (1, 2)))


def test_weights_that_part_are_found_and_the_run_goes_on_from_a_checkpoint(
    data: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit changes after step 17; the next look is after step 21, the last checkpoint is that of step 12."""
    monkeypatch.setattr("lockstep.training.exchange.compare_ranks.COMPARE_EVERY", 7)
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 12, "epochs": 3}
    train(data["table"], tmp_path / "whole", 2, f"{OWN}:momentum", **options)
    _models.FAIL_AT.update(step=17)
    result = train(data["table"], tmp_path / "run", 2, f"{OWN}:momentum_that_parts", **options)
    assert not _models.FAIL_AT and result.restarts == 1
    told = capfd.readouterr().err
    assert "the weights of rank 1 are not those of rank 0 after step 21" in told and "resuming from step" in told
    mine, other = (final_tensors(str(tmp_path / name)) for name in ("whole", "run"))
    assert all(value.tobytes() == other[name].tobytes() for name, value in mine.items() if "callbacks" not in name)


def test_one_rank_that_wants_to_stop_stops_all_of_them(data: dict[str, str], tmp_path: Path) -> None:
    from tests.training import _models  # imports TensorFlow

    _models.StopOnOneRank.asked = False
    result = train(data["table"], tmp_path / "run", 3, f"{OWN}:stops")
    assert _models.StopOnOneRank.asked
    assert result.steps == 6, "asked after step 5, agreed with step 6"
    assert final_state(str(tmp_path / "run"))["stopped"]


def test_a_changed_checkpoint_is_refused_and_its_parent_used(data: dict[str, str], tmp_path: Path) -> None:
    url = tmp_path / "run"
    train(data["table"], url, 1, "logistic", epochs=2, checkpoint_every=8)
    newest = max((url / "checkpoints").iterdir())
    file = newest / "rank-00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    shutil.rmtree(url / "results")
    assert train(data["table"], url, 1, "logistic", epochs=2, checkpoint_every=8).steps == 16
    assert len(rows_of(str(url), "step")) == 16


def test_another_model_cannot_go_on_with_a_run(data: dict[str, str], tmp_path: Path) -> None:
    train(data["table"], tmp_path / "run", 1, "logistic", epochs=1)
    with pytest.raises(ConfigError, match="model"):
        train(data["table"], tmp_path / "run", 1, f"{OWN}:stops", epochs=2)


def test_a_shard_that_is_damaged_where_a_run_resumes_ends_it_at_once_and_says_from_where_it_resumes(
    data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(data["table"], tmp_path / "copy")
    train(str(copy), tmp_path / "run", 2, f"{OWN}:momentum", epochs=1)
    for shard in (copy / "split=train").iterdir():
        content = bytearray(shard.read_bytes())
        content[::9] = (byte ^ 1 for byte in content[::9])
        shard.write_bytes(content)
    capsys.readouterr()
    with pytest.raises(CorruptionError, match=r"checksum.*part-") as caught:
        train(str(copy), tmp_path / "run", 2, f"{OWN}:momentum", epochs=2)
    said = capsys.readouterr().err
    assert said.count("resuming from") == 1 and "generation" not in said, said
    assert caught.value.next_step.endswith("It resumes from step-0000000008.g0001.")


def test_a_dataset_that_was_damaged_is_refused(data: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data["table"], copy)
    shard = sorted((copy / "split=train").iterdir())[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptionError, match=shard.name):
        train(str(copy), tmp_path / "run", 2, "logistic", epochs=1)
