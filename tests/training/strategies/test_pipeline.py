"""--pipeline-stages: one rank's results from stages of layers, which hold their own weights only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.results.audit import check_run_audit
from tests.training._ring import run_ring
from tests.training._threads import final_tensors
from tests.training._tiny import write_images
from tests.training.rank.test_fit import assert_no_bit_differs, assert_same, assert_same_result, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "images"
    write_images(folder, records={"train": 400, "test": 30})
    return str(folder)


OPTIONS: dict[str, Any] = {"precision": "float64", "learning_rate": 0.05, "epochs": 3, "lanes": 8, "validate": "test"}


@pytest.fixture(scope="module")
def alone(images: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """50 steps of a ResNet on one rank."""
    run = tmp_path_factory.mktemp("one")
    return str(run), train(images, run, 1, "resnet8", **OPTIONS)


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule"),
    [
        (2, 2, "1f1b"),
        pytest.param(2, 2, "gpipe", marks=pytest.mark.soak),
        pytest.param(3, 3, "1f1b", marks=pytest.mark.soak),
        pytest.param(3, 3, "gpipe", marks=pytest.mark.soak),
        pytest.param(4, 2, "1f1b", marks=pytest.mark.soak),
        pytest.param(6, 3, "gpipe", marks=pytest.mark.soak),
    ],
)
def test_stages_are_one_rank_in_float64(
    images: str, alone: tuple[str, Any], tmp_path: Path, ranks: int, stages: int, schedule: str
) -> None:
    """A ResNet with skip connections and ghost batch statistics, whose micro-batches are lane groups; its momentum is
    the sum of the gradients.
    """
    more: dict[str, Any] = {"pipeline_stages": stages, "schedule": schedule, "micro_batches": 4, "audit": True}
    cut = train(images, tmp_path / "cut", ranks, "resnet8", **OPTIONS, **more)
    assert alone[1].steps == cut.steps == 50
    assert_same(final_tensors(alone[0]), final_tensors(str(tmp_path / "cut")))
    assert_same_result(alone[1], cut)
    assert check_run_audit(str(tmp_path / "cut")).ok


def test_a_restart_changes_no_bit_and_draws_do_not_depend_on_the_stages(table: str, tmp_path: Path) -> None:
    """Killed between two checkpoints, with dropout, penalties and a callback that sets the rate."""
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 7, "epochs": 3, "precision": "float64", "audit": True}
    cut: dict[str, Any] = {"pipeline_stages": 2, "micro_batches": 3, **options}
    whole = train(table, tmp_path / "whole", 2, f"{OWN}:stacked", **cut)
    _models.FAIL_AT.update(step=18)
    broken = train(table, tmp_path / "broken", 2, f"{OWN}:stacked", **cut)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok
    three = train(table, tmp_path / "three", 3, f"{OWN}:stacked", **{**cut, "pipeline_stages": 3, "schedule": "gpipe"})
    assert_same(final_tensors(str(tmp_path / "whole")), final_tensors(str(tmp_path / "three")))
    assert_same_result(whole, three)


PATH: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"pipeline_stages": 2, "micro_batches": 2}),
    (1, {}),
    (3, {"pipeline_stages": 3, "micro_batches": 4}),
    (2, {"zero": 1}),
    (4, {"pipeline_stages": 2}),
    (3, {"zero": 2}),
    (2, {"pipeline_stages": 2, "cut_after": "dense_0"}),
)
"""Ranks and options of one start after another."""


@pytest.mark.parametrize("path", [PATH[:4], pytest.param(PATH, marks=pytest.mark.soak)], ids=["some", "all"])
def test_each_start_holds_what_another_has_saved(table: str, tmp_path: Path, compared: list[int], path: Any) -> None:
    """Each start compares what its ranks have restored with the files, bit for bit; the last exports a plain model."""
    import keras

    for step, (ranks, more) in enumerate(path, 1):
        train(table, tmp_path / "run", ranks, f"{OWN}:stacked", max_steps=step, epochs=1, audit=True, **more)
    assert len(compared) == len(path) - 1 and min(compared) > 8
    exported = keras.models.load_model(next((tmp_path / "run").rglob(f"g{len(path):04d}/model.keras")))
    mine = final_tensors(str(tmp_path / "run"))
    for number, one in enumerate([*exported.weights]):
        assert (
            next(v for n, v in mine.items() if n.startswith(f"weights/{number:04d}/")).tobytes()
            == one.numpy().tobytes()
        )
    assert [int(exported.optimizer.iterations)] == [len(path)]


def test_a_rank_holds_its_stage_only_and_at_most_as_many_micro_batches_as_stages() -> None:
    import keras
    import tensorflow as tf

    from lockstep.training.strategies.pipeline import pipeline_step
    from lockstep.training.world import Grid

    def made() -> Any:
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(4))])
        model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
        model.evaluate(np.zeros((2, 64)), np.zeros((2, 64)), verbose=0)  # builds losses and metrics
        return model

    models = [made() for _ in range(2)]
    held = {}

    def work(comm: Communicator) -> tuple[int, int]:
        model = models[comm.rank]
        batch = tuple(tf.ones((16, 64)) for _ in range(2))
        step = pipeline_step(model, comm, Grid(1, 2, 1), rows=16, global_batch=16, schedule="1f1b", micro_batches=8)
        step.train(batch)
        held[comm.rank] = step.most_held
        step.links.close()
        step.exchange.close()
        weights, state = (
            sum(np.asarray(one.value.read_value()).nbytes for one in variables)
            for variables in (model.weights, model.optimizer.variables)
        )
        return weights, state

    one = 4 * (64 * 64 + 64)
    for weights, state in run_ring(2, work):
        assert weights == 2 * one and state == pytest.approx(4 * one, abs=16)
    assert held == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("use_ema", lambda model: setattr(model.optimizer, "use_ema", True)),
        ("global_clipnorm", lambda model: setattr(model.optimizer, "global_clipnorm", 1.0)),
        ("built already", lambda model: model.optimizer.build(model.trainable_variables)),
    ],
)
def test_what_stages_cannot_train_is_refused_by_name(name: str, change: Any) -> None:
    import keras

    from lockstep.training.strategies.pipeline import check_model

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    check_model(model)
    change(model)
    with pytest.raises(ConfigError, match="--pipeline-stages cannot train") as caught:
        check_model(model)
    assert name in caught.value.what + caught.value.got
