"""Whole runs with micro-batches, mixed precision and a scaled learning rate, by ranks as threads."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from lockstep.training.results.report import write_report
from lockstep.training.run.metrics import read_history
from tests.builders.evaluations import evaluate
from tests.training._threads import final_tensors, rows_of, run, run_threads
from tests.training._tiny import write_images, write_table
from tests.training.rank.test_fit import assert_same

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    write_table(folder / "table", records={"train": 96, "test": 8})
    write_images(folder / "images", records={"train": 96, "test": 8})
    return {"table": str(folder / "table"), "images": str(folder / "images")}


def config(dataset: str, url: Path, num_ranks: int, model: str, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "lanes": 6, "batchnorm": "local", "epochs": 3, "seed": 7} | more
    return TrainConfig(datasets=(dataset,), run=str(url), num_ranks=num_ranks, model=model, launcher="local", **options)


def test_micro_batches_change_nothing(data: dict[str, str], tmp_path: Path) -> None:
    """Three lanes of eight rows on two ranks: micro-batches of 4 and 8 rows. Schedules count steps."""
    options: dict[str, Any] = {
        "precision": "float64",
        "lanes": 3,
        "learning_rate_scaling": "linear",
        "base_batch": 8,
        "warm_up_epochs": 1.5,
    }
    whole = config(data["table"], tmp_path / "whole", 1, f"{OWN}:momentum", **options)
    parts = config(data["table"], tmp_path / "parts", 2, f"{OWN}:momentum", micro_batches=2, **options)
    assert run(whole).steps == run(parts).steps == 12
    mine, other = final_tensors(whole.run), final_tensors(parts.run)
    trained = {name for name, value in mine.items() if name.startswith("weights")}
    assert_same({name: mine[name] for name in trained}, {name: other[name] for name in trained})
    np.testing.assert_allclose(losses_of(whole.run), losses_of(parts.run), rtol=1e-9)
    told = read_history(parts.run).learning_rate
    assert told is not None
    url = write_report(parts.run)
    assert "linear from a global batch of 8, 1.5 epochs of warm-up" in Path(url).read_text()
    assert (told["rule"], told["base_rate"], told["factor"], told["peak"]) == ("linear", 0.25, 3.0, 0.75)
    assert (told["warm_up_steps"], told["momentum_correction"]) == (6, True)
    # What is exported loads without the project's classes, and so can be evaluated.
    import keras

    (file,) = Path(parts.run, "models").glob("*/model.keras")
    with zipfile.ZipFile(file) as archive:
        assert "training." not in archive.read("config.json").decode()
    optimizer = keras.models.load_model(file).optimizer
    assert (type(optimizer), float(optimizer.learning_rate.numpy())) == (keras.optimizers.SGD, 0.75)
    assert evaluate(parts.run, data["table"], "test", run_threads)["samples"] == 8


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("logistic", {"micro_batches": 3, "num_ranks": 4}, "Use --micro-batches 2 or"),  # a rank of four rows
        ("logistic", {"learning_rate_scaling": "linear"}, "base_batch"),
        ("logistic", {"base_batch": 8}, "base_batch"),
        ("logistic", {"warm_up_epochs": 3.0}, "warm_up_epochs"),
        ("resnet8", {"learning_rate_scaling": "linear", "base_batch": 8}, "give --learning-rate"),
        ("resnet8", {"warm_up_epochs": 1.0}, "give --learning-rate"),
    ],
)
def test_what_cannot_be_is_told_before_ranks_start(
    data: dict[str, str], tmp_path: Path, model: str, more: dict[str, Any], message: str
) -> None:
    from lockstep.training.driver.preflight import plan_for

    dataset = data["images" if model == "resnet8" else "table"]
    with pytest.raises(ConfigError, match=message):
        plan_for(load_dataset(dataset), config(dataset, tmp_path, more.pop("num_ranks", 1), model, **more))


@pytest.mark.parametrize(
    ("batchnorm", "message"),
    [("ghost", "do not hold whole lane groups"), ("sync", "cannot be split into micro-batches")],
)
def test_batch_statistics_and_micro_batches(data: dict[str, str], tmp_path: Path, batchnorm: str, message: str) -> None:
    lanes = {"lanes": 24} if batchnorm == "ghost" else {}
    with pytest.raises(ConfigError, match=message):
        run(config(data["images"], tmp_path, 1, f"{OWN}:small_conv", batchnorm=batchnorm, micro_batches=3, **lanes))


def test_a_model_that_accumulates_by_itself_is_refused_by_name(data: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accumulates gradients itself"):
        run(config(data["table"], tmp_path, 1, f"{OWN}:accumulating"))


def losses_of(run_url: str) -> list[float]:
    return [row["loss"] for _, row in sorted(rows_of(run_url, "step").items())]


def test_float16_and_a_restart_that_changes_no_bit(data: dict[str, str], tmp_path: Path) -> None:
    """The loss scale is too large at first: steps are skipped on all ranks, and counted; a checkpoint holds it."""
    from tests.training import _models  # imports TensorFlow

    more: dict[str, Any] = {"precision": "mixed_float16", "checkpoint_every": 2, "batchnorm": "sync", "epochs": 5}
    whole, broken = (
        config(data["images"], tmp_path / name, 2, f"{OWN}:small_conv_that_fails", **more)
        for name in ("whole", "broken")
    )
    run(whole)
    _models.FAIL_AT.update(step=8)
    assert run(broken).restarts == 1
    mine, other = (final_tensors(c.run) for c in (whole, broken))
    assert sorted(mine) == sorted(other)
    assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)
    assert {value.dtype.name for name, value in mine.items() if name.startswith("weights")} == {"float32"}
    (scale,) = (value for name, value in mine.items() if "dynamic_scale" in name)
    assert scale < 2.0**22, "halved until gradients were finite"
    assert any(row.get("skipped") for row in rows_of(whole.run, "step").values())
    assert losses_of(whole.run)[-1] < losses_of(whole.run)[0]


def test_micro_batches_of_float16_and_a_restart_that_changes_no_bit(data: dict[str, str], tmp_path: Path) -> None:
    """Accumulators, the loss scale, the rate of a warm-up and of the step before."""
    from tests.training import _models  # imports TensorFlow

    more: dict[str, Any] = {"precision": "mixed_float16", "micro_batches": 2, "warm_up_epochs": 1.0}
    whole, broken = (
        config(data["table"], tmp_path / name, 2, f"{OWN}:momentum_that_fails", checkpoint_every=3, **more)
        for name in ("whole", "broken")
    )
    run(whole)
    _models.FAIL_AT.update(step=8)  # calls of four steps that were not skipped
    assert run(broken).restarts == 1
    for rank in (0, 1):
        mine, other = (final_tensors(c.run, rank) for c in (whole, broken))
        assert sorted(mine) == sorted(other)
        assert all(mine[name].tobytes() == other[name].tobytes() for name in mine)
    assert any(name.endswith("last_rate") for name in final_tensors(whole.run))
    assert losses_of(whole.run) == losses_of(broken.run)


def test_bfloat16(data: dict[str, str], tmp_path: Path) -> None:
    given = config(data["images"], tmp_path / "run", 2, f"{OWN}:small_conv", precision="mixed_bfloat16")
    assert run(given).steps == 12
    tensors = final_tensors(given.run)
    assert not any("dynamic_scale" in name for name in tensors)
    assert {value.dtype.name for name, value in tensors.items() if name.startswith("weights")} == {"float32"}
    assert losses_of(given.run)[-1] < losses_of(given.run)[0]
