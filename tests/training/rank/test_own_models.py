"""Whole runs of models as people bring them, by ranks as threads: plain Keras' weights in float64, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig
from tests.training._threads import final_tensors, rows_of, run
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
OWN = "tests.training._coupled"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = tmp_path_factory.mktemp("data") / "table"
    write_table(url, records={"train": 96, "test": 8})
    return str(url)


def config(dataset: str, url: Path, num_ranks: int, model: str, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"global_batch": 24, "lanes": 6, "batchnorm": "local", "epochs": 2, "seed": 7} | more
    options |= {"precision": "float64"}
    return TrainConfig(datasets=(dataset,), run=str(url), num_ranks=num_ranks, model=model, launcher="local", **options)


def plain(chosen: TrainConfig) -> list[np.ndarray]:
    """The weights after `fit` of plain Keras on the same global batches."""
    import keras

    from lockstep.storage.dataset.manifest import load_dataset
    from lockstep.training.batches.tf_dataset import FeedPipeline
    from lockstep.training.batches.training_set import TrainingSet
    from lockstep.training.driver.preflight import plan_for
    from lockstep.training.models import ModelOptions, build
    from lockstep.training.rank.runtime import set_precision
    from lockstep.training.reading.reader import ReadOptions
    from lockstep.training.world import World

    keras.utils.clear_session()
    set_precision(chosen.step.precision)
    keras.utils.set_random_seed(chosen.data.seed)
    split = TrainingSet.at(chosen.data.datasets, chosen.data.split, chosen.data.mix, ReadOptions.of(chosen, 1))
    plan = plan_for(load_dataset(chosen.data.datasets[0]), chosen)
    model = build(chosen.model.model, split.encoder.signature, ModelOptions(extra=chosen.model.extra)).model
    model.jit_compile = False
    with FeedPipeline(split.feed(plan, World.local(0, 1, 1)), 0, plan.steps(chosen.data.epochs)) as pipeline:
        model.fit(pipeline.dataset, verbose=0, shuffle=False)
    set_precision("float32")
    return [np.asarray(weight.value) for weight in model.weights]


def assert_plain(chosen: TrainConfig) -> None:
    found = [value for name, value in sorted(final_tensors(chosen.run).items()) if name.startswith("weights/")]
    for mine, theirs in zip(found, plain(chosen), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("one", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 3))])
def test_two_optimizers_in_a_step(data: str, tmp_path: Path, num_ranks: int, one: bool) -> None:
    """A run that ends after an epoch and goes on has their states, too."""
    whole = config(data, tmp_path / "run", num_ranks, f"{OWN}:gan", extra={"one": one})
    run(config(data, tmp_path / "run", num_ranks, f"{OWN}:gan", extra={"one": one}, epochs=1))
    result = run(whole)
    assert set(result.metrics) == {"critic_loss", "generator_loss"}
    assert_plain(whole)
    states = [name for name in final_tensors(whole.run) if name.startswith("optimizer/") and name.endswith("momentum")]
    assert len(states) >= 8


@pytest.mark.parametrize(
    "more", [{"canonical": True, "num_ranks": 2}, {"micro_batches": 2}, {"non_finite": "skip"}, {"delay": 1}]
)
def test_what_two_optimizers_cannot_be_combined_with(data: str, tmp_path: Path, more: dict[str, Any]) -> None:
    num_ranks = more.pop("num_ranks", 1)
    batch = {"lanes": 8} if "canonical" in more else {}
    with pytest.raises(ConfigError, match="cannot be combined with optimizers other than that of `compile`"):
        run(config(data, tmp_path / "run", num_ranks, f"{OWN}:gan", **more, **batch))


def test_a_vector_among_the_logs_of_a_step_is_the_mean_over_rows(data: str, tmp_path: Path) -> None:
    chosen = config(data, tmp_path / "run", 2, f"{OWN}:vector")
    metrics = run(chosen).metrics
    np.testing.assert_allclose(metrics["twice"], [metrics["loss"], 2 * metrics["loss"]], rtol=1e-9)
    assert 0.5 < metrics["auc"] <= 1.0
    assert_plain(chosen)


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("pairs", {"num_ranks": 2}, "the loss in_batch: it depends on which rows are together"),
        ("pairs", {"num_ranks": 1, "micro_batches": 2}, "it depends on which rows are together"),
        pytest.param("sharpness", {"num_ranks": 2}, "changes weights within a step", marks=pytest.mark.soak),
        ("largest", {"num_ranks": 2}, "the metric largest of the model"),
    ],
)
def test_what_is_refused_before_the_first_step(
    data: str, tmp_path: Path, model: str, more: dict[str, Any], words: str
) -> None:
    chosen = config(data, tmp_path / "run", model=f"{OWN}:{model}", **more)
    with pytest.raises(ConfigError) as caught:
        run(chosen)
    assert words in str(caught.value)
    assert not rows_of(chosen.run, "step")


@pytest.mark.soak
def test_gathered_rows_are_those_of_a_global_batch_with_lanes_of_unequal_ranks(data: str, tmp_path: Path) -> None:
    """Six lanes on four ranks: 4 or 8 rows a rank."""
    chosen = config(data, tmp_path / "run", 4, f"{OWN}:pairs", extra={"ranks": True}, epochs=1)
    run(chosen)
    assert_plain(chosen)


def test_gathered_rows_need_whole_batches(data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on_ranks\.gather needs all rows of a step at once"):
        run(config(data, tmp_path / "run", 1, f"{OWN}:pairs", extra={"ranks": True}, micro_batches=2))
