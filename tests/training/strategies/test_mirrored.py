"""--strategy mirrored and multi-worker-mirrored: real processes of TensorFlow's strategies beside ranks of ours."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.result import RunResult
from tests.horovod.test_horovod import DATA
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._tiny import write_rows
from tests.training.rank.test_fit import assert_same, assert_same_result
from tests.training.rank.test_keep_best import checkpoint_weights, model_weights

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
WAYS: dict[str, dict[str, Any]] = {
    "mirrored": {"num_ranks": 1, "devices": 2},
    "multi-worker-mirrored": {"num_ranks": 2, "trust_network": "127.0.0.0/8"},
}
EPOCH = 16  # steps


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first 256 pictures of Fashion-MNIST, and 30 to test."""
    records = {"train": 256, "test": 30}
    total = sum(records.values())
    with gzip.open(DATA / "train-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)[:total]
    with gzip.open(DATA / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[:total].astype(np.int64)
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="image", dtype="uint8", shape=(28, 28, 1)),
            Field(name="label", dtype="int64", kind="label", num_classes=10),
        )
    )
    ids = pa.array(range(total), type=pa.int64())
    columns = [ids, pa.array([row.tobytes() for row in pixels], type=pa.binary()), pa.array(labels)]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema.arrow_schema())
    folder = str(tmp_path_factory.mktemp("data") / "fashion")
    write_rows(folder, schema, rows, records, "parquet", 2, 16, 0)
    return folder


def config(data: str, url: Path, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"model": "resnet8", "global_batch": 16, "lanes": 8, "epochs": 2, "launcher": "local"}
    options |= {"num_ranks": 2, "seed": 7, "audit": True, "checkpoint_every": 1000}
    return TrainConfig(datasets=(data,), run=str(url), **(options | more))


def strategy(name: str, data: str, url: Path, **more: Any) -> RunResult:
    """A run by processes of its own."""
    return train(config(data, url, strategy=name, **(WAYS[name] | more)), run_local, hooks=Hooks(lease_watch_s=0.1))


@pytest.mark.parametrize("model", [f"{OWN}:drops", pytest.param("resnet8", marks=pytest.mark.soak)])
def test_devices_and_workers_are_ranks(model: str, fashion: str, tmp_path: Path) -> None:
    """The same weights, metrics and samples, with batch statistics of lane groups and noise drawn by each replica."""
    options: dict[str, Any] = {"model": model, "precision": "float64", "augment": "crop:2 flip"}
    if model == "resnet8":
        options["learning_rate"] = 0.05
    else:
        # Under TensorFlow's strategies dropout draws other units; Adam divides tiny gradients by their own size.
        options["extra"] = {"dropout": 0.0, "rate": 0.001}
    ours = _threads.run(config(fashion, tmp_path / "ours", **options))
    for name in WAYS:
        theirs = strategy(name, fashion, tmp_path / name, **options)
        assert theirs.steps == ours.steps == 2 * EPOCH
        assert_same(*(_threads.final_tensors(str(tmp_path / one)) for one in ("ours", name)))
        assert_same_result(ours, theirs)
        losses = [_threads.rows_of(str(tmp_path / one), "step") for one in ("ours", name)]
        for step in range(1, 2 * EPOCH + 1):
            assert losses[1][step]["loss"] == pytest.approx(losses[0][step]["loss"], rel=1e-6)
        assert check_run_audit(str(tmp_path / name)).ok


@pytest.mark.soak
@pytest.mark.parametrize("name", WAYS)
def test_a_killed_run_ends_as_one_that_never_stopped(name: str, fashion: str, tmp_path: Path) -> None:
    """Killed within an epoch, with dropout of each kind, metrics and a validation: no bit differs."""
    more: dict[str, Any] = {"model": f"{OWN}:drops", "checkpoint_every": 6, "validate": "test"}
    kill = {"kill_at": 0, "kill_once": str(tmp_path / "killed")}
    whole = strategy(name, fashion, tmp_path / "whole", extra=kill, **more)
    again = strategy(name, fashion, tmp_path / "again", extra=kill | {"kill_at": EPOCH + 5}, **more)
    assert (tmp_path / "killed").exists() and again.restarts == 1 and whole.metrics == again.metrics
    mine, other = (_threads.final_tensors(str(tmp_path / one)) for one in ("whole", "again"))
    assert any(name.startswith("weights") for name in mine)
    assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in other.items()}
    assert check_run_audit(str(tmp_path / "again")).ok


@pytest.mark.soak
@pytest.mark.parametrize("name", WAYS)
def test_the_model_is_the_best_checkpoint(name: str, fashion: str, tmp_path: Path) -> None:
    """The loss falls, so that the rule takes the first epoch's."""
    done = strategy(name, fashion, tmp_path / "run", validate="test", keep_best="loss:max")
    assert done.best is not None and (done.best["step"], done.steps) == (EPOCH, 2 * EPOCH)
    assert done.model is not None
    assert model_weights(done.model) == checkpoint_weights(done.run, EPOCH) != checkpoint_weights(done.run, 2 * EPOCH)


@pytest.mark.soak
def test_another_number_of_workers_and_devices_continues(fashion: str, tmp_path: Path) -> None:
    """Within an epoch: its metrics are of all its samples."""
    options: dict[str, Any] = {"precision": "float64", "learning_rate": 0.05}
    ours = _threads.run(config(fashion, tmp_path / "ours", **options))
    for name, second in (("multi-worker-mirrored", {"num_ranks": 4}), ("mirrored", {"devices": 4})):
        strategy(name, fashion, tmp_path / name, **options, max_steps=EPOCH + 5)
        theirs = strategy(name, fashion, tmp_path / name, **(options | second))
        assert_same(*(_threads.final_tensors(str(tmp_path / one)) for one in ("ours", name)))
        assert_same_result(ours, theirs)
        assert check_run_audit(str(tmp_path / name)).ok


@pytest.mark.soak
@pytest.mark.parametrize("name", WAYS)
def test_a_step_that_is_not_finite_ends_the_run(name: str, fashion: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not finite") as caught:
        strategy(name, fashion, tmp_path / "run", model=f"{OWN}:drops", extra={"rate": 1e30})
    assert "samples" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mirrored", {"num_ranks": 2}),
        ("mirrored", {"delay": 1}),
        ("mirrored", {"canonical": True}),
        ("mirrored", {"devices": 0}),
        ("multi-worker-mirrored", {"devices": 2}),
        ("multi-worker-mirrored", {"trust_network": None}),
        ("multi-worker-mirrored", {"compression": "bf16"}),
        ("multi-worker-mirrored", {"micro_batches": 2}),
        ("multi-worker-mirrored", {"precision": "mixed_float16"}),
        ("multi-worker-mirrored", {"batchnorm": "sync"}),
        ("sync", {"devices": 2}),
    ],
)
def test_what_does_not_fit_is_refused(name: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the training configuration's"):
        config("data", Path("run"), strategy=name, **(WAYS.get(name, {}) | more))
