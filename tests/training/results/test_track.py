"""Metrics of a real run in TensorBoard's files and in MLflow, read back with what those programs read."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs import track as job
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import train
from lockstep.training.launch.local import run_local
from lockstep.training.results.track import MLflow, Sent, TensorBoard, track
from lockstep.training.run.metrics import read_history
from tests.training._tiny import write_table

# (validation, curve, step, value) of TensorBoard's own format: framed records of protobuf messages.
Scalar = tuple[str, str, int, float]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run of two epochs on one rank, with a validation."""
    root = tmp_path_factory.mktemp("tracked")
    write_table(root / "data")
    config = TrainConfig(
        datasets=(str(root / "data"),), run=str(root / "run"), model="mlp", num_ranks=1,
        global_batch=8, epochs=2, launcher="local", validate="test", stall_limit_s=300.0,
    )  # fmt: skip
    train(config, run_local)
    return config


def scalars(folder: Path) -> list[Scalar]:
    """What the event files hold, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for name in ("training", "validation"):
        for file in sorted((folder / name).glob("events.out.tfevents.*")):
            data = file.read_bytes()
            while data:
                size = int.from_bytes(data[:8], "little")
                event = Event.FromString(data[12 : 12 + size])
                data = data[12 + size + 4 :]
                found += [(name, value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


@pytest.mark.slow
def test_each_number_is_in_tensorboard_s_files_once(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two calls write each once; the second finds nothing new."""
    call = [config.run, "--tensorboard", str(tmp_path), "--follow"]
    assert job.main(call) == 0
    first = scalars(tmp_path / "run")
    assert job.main(call) == 0
    assert scalars(tmp_path / "run") == first
    assert capsys.readouterr().out.splitlines()[1].endswith("finished, step 25 of 25, 0 numbers sent")
    history = read_history(config.run)
    steps = [(step, value) for name, curve, step, value in first if (name, curve) == ("training", "step_loss")]
    assert dict(steps) == pytest.approx({row["step"]: row["loss"] for row in history.steps}, rel=1e-6)
    for name, prefix in (("training", ""), ("validation", "val_")):
        auc = [(step, value) for one, curve, step, value in first if (one, curve) == (name, "auc")]
        assert dict(auc) == pytest.approx({row["step"]: row["metrics"][f"{prefix}auc"] for row in history.epochs})
    assert {"rank_0/compute_s", "rank_0/rss_bytes"} <= {curve for _, curve, _, _ in first}


@pytest.mark.slow
def test_another_run_of_the_same_name_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    assert job.main([config.run, "--tensorboard", str(tmp_path)]) == 0
    tracker = TensorBoard(str(tmp_path / "elsewhere" / "run"), str(tmp_path))
    with pytest.raises(ConfigError, match="another run"):
        tracker.sent()


@pytest.mark.slow
def test_a_part_at_a_time_is_the_whole(config: TrainConfig) -> None:
    """Rows that arrive later, a repeated step among them, are sent once; a value that is not finite is left out."""
    history = read_history(config.run)
    half = dataclasses.replace(
        history, steps=history.steps[:7], epochs=[], times=history.times[:1], usage=history.usage[:1]
    )
    sent, whole = (
        Sent.of(dict.fromkeys(("steps", "epochs", "times", "usage"), 0), ""),
        Sent(steps=0, epochs=0, times=0, usage=0),
    )
    in_parts = sent.take(half) + sent.take(history) + sent.take(history)
    assert sorted(in_parts, key=repr) == sorted(whole.take(history), key=repr) and sent == whole
    bad = dataclasses.replace(history, steps=[{**history.steps[0], "step": 99, "loss": "nan"}])
    assert sent.take(bad) == []


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere to send"):
        job.main([str(tmp_path)])
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="--tensorboard needs the package tensorboardX") as caught:
        job.main([str(tmp_path), "--tensorboard", str(tmp_path)])
    assert "requirements-tracking.txt" in caught.value.next_step


@pytest.mark.slow
@pytest.mark.soak  # installs MLflow, 130 MB
def test_a_run_in_mlflow(config: TrainConfig, tmp_path: Path, mlflow_packages: None) -> None:
    """One run of MLflow however often it is sent: parameters, curves, dataset and end; an absent server is an error."""
    server = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        assert job.main([config.run, "--mlflow", server, "--experiment", "tiny"]) == 0
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    history = read_history(config.run)
    assert run.info.status == "FINISHED" and run.data.params["model"] == "mlp"
    losses = {(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "step_loss")}
    assert losses == {(row["step"], row["loss"]) for row in history.steps}
    assert run.data.metrics["val_auc"] == history.epochs[-1]["metrics"]["val_auc"]
    assert run.inputs.dataset_inputs[0].dataset.source == config.data.datasets[0]
    with pytest.raises(LockstepError, match="did not answer"):
        track(config.run, MLflow(config.run, "http://127.0.0.1:9", "tiny"))


@pytest.fixture
def mlflow_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow with its store, in a folder of its own."""
    pinned = [line for line in Path("requirements-tracking.txt").read_text().splitlines() if line.startswith("mlflow")]
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--target",
        str(tmp_path / "packages"),
    ]
    subprocess.run([*install, *pinned, "sqlalchemy<2.1", "alembic"], check=True)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
