"""Several datasets, an output layer for each: in one sum a step, and by --strategy tasks, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import BUCKET_BYTES, lay_out
from lockstep.training.exchange.exchange import SoloExchange
from lockstep.training.results.predictor import ExportedModel
from lockstep.training.results.report import write_report
from lockstep.training.strategies.tasks import TaskExchange
from tests.builders.evaluations import evaluate, predict
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._fit_ranks import precision
from tests.training._ring import run_ring, run_solo
from tests.training._tasks import write_task
from tests.training.rank.test_fit import assert_no_bit_differs, assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tasks")
    return write_task(folder, "kinds", seed=1), write_task(folder, "sides", rows=72, seed=2)


def config_of(pair: tuple[str, ...], run: Path, num_ranks: int, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "datasets": pair, "run": str(run), "num_ranks": num_ranks, "model": "mlp", "mix": (1, 1), "tasks": "equal",
        "global_batch": 16, "epochs": 2, "lanes": 8, "launcher": "local", "checkpoint_every": 1000, "seed": 7,
        "extra": {"width": 8, "dropout": 0.0}, "learning_rate": 0.02, "precision": "float64",
    }  # fmt: skip
    return TrainConfig(**(options | more))


@pytest.mark.parametrize("tasks", ["equal", "uncertainty"])
def test_n_ranks_are_one_rank(pair: tuple[str, str], tmp_path: Path, tasks: str) -> None:
    found = [_threads.run(config_of(pair, tmp_path / str(n), n, tasks=tasks, validate="test")) for n in (1, 2)]
    assert_same(*(_threads.final_tensors(str(tmp_path / str(n))) for n in (1, 2)))
    assert found[0].metrics == pytest.approx(found[1].metrics, rel=1e-9)
    assert {"loss_0", "accuracy_1", "val_accuracy_0", "val_accuracy_1", "val_accuracy"} <= found[0].metrics.keys()
    if tasks == "uncertainty":
        assert_page_shows_each_task(tmp_path / "2", pair, found[1].metrics)


def assert_page_shows_each_task(run: Path, pair: tuple[str, str], metrics: dict[str, Any]) -> None:
    evaluation = evaluate(str(run), pair[0], "test", _threads.run_threads)
    page = Path(write_report(str(run), evaluation)).read_text()
    section = page.split("<h2>Tasks</h2>")[1].split("<h2>")[0]
    lines = [re.findall(r"<t[hd]>([^<]*)", line) for line in re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)]
    table = pd.DataFrame(lines[1:], columns=lines[0])
    assert list(table["task"]) == ["0: kinds", "1: sides"]
    for head, name in (
        ("training loss", "loss"),
        ("validation accuracy", "val_accuracy"),
        ("learned weight", "weight"),
    ):
        assert list(table[head].astype(float)) == pytest.approx(
            [metrics[f"{name}_{number}"] for number in (0, 1)], abs=6e-5
        ), head
    by_url = {one["dataset"]: one["metrics"]["accuracy"] for one in evaluation["by_dataset"]}
    assert list(table["accuracy on test"].astype(float)) == pytest.approx([by_url[url] for url in pair], abs=6e-5)
    assert metrics["weight_0"] != metrics["weight_1"] and "learned weight by epoch" in section
    assert "accuracy_0" not in page.split("<h2>Curves</h2>")[1].split("<h2>")[0], "a figure with a line a task has it"


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run's last checkpoint, by the end of their names."""
    tensors = _threads.final_tensors(str(run))
    names = [name for name in sorted(tensors) if name.startswith("weights/")]
    return {"/".join(name.split("/")[-2:]): tensors[name] for name in names}


def heads_apart(weights: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The trunk's weights, and those of the output layers."""
    heads = [f"_task_{number}/{name}" for number in (0, 1) for name in ("kernel", "bias")]
    return [value for name, value in weights.items() if name not in heads], [weights[name] for name in heads]


def plain_copies(config: TrainConfig, every: int) -> dict[str, np.ndarray]:
    """What two models of plain Keras, trained by themselves and averaged by hand every `every` steps, come to."""
    import keras
    import tensorflow as tf

    from lockstep.training.batches.training_set import TrainingSet
    from lockstep.training.driver.preflight import plan_for
    from lockstep.training.models import ModelOptions
    from lockstep.training.models.tasks import TaskModel
    from lockstep.training.plan.mixture import MixedPlan
    from lockstep.training.world import World
    from tests.training._tasks import seeded

    opened = TrainingSet.at(config.data.datasets, "train", config.data.mix, tasks=True)
    plan = plan_for(opened.manifest, config)
    assert isinstance(plan, MixedPlan)
    start = seeded(opened.encoder.signature, ModelOptions(tasks="equal"))
    assert isinstance(start, TaskModel)
    copies = []
    for number, width in enumerate((3, 2)):
        x = keras.Input((2,))
        y = keras.layers.Dense(8, "relu")(keras.layers.Dense(8, "relu")(x))
        model = keras.Model(x, keras.layers.Dense(width, "softmax")(y))
        given = [layer for layer in start.layers if layer.weights and not layer.name.startswith("_task_")]
        model.set_weights([w for layer in [*given, start.get_layer(f"_task_{number}")] for w in layer.get_weights()])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy")
        copies.append(model)
    feed = opened.feed(plan, World.local(0, 1))
    for step in range(plan.steps(config.data.epochs)):
        batch = feed.batch(step)
        for number, model in enumerate(copies):
            mine = batch.x["_dataset"] == number
            assert batch.y is not None
            with tf.GradientTape() as tape:
                output = model(np.hstack([batch.x["a"], batch.x["b"]])[mine], training=True)
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(batch.y[mine], output))
            grads = tape.gradient(loss, [one.value for one in model.trainable_variables])
            # Half of the rows are a task's: in the mean over all rows its output layer has half of its gradient.
            model.optimizer.apply([*grads[:4], *(0.5 * grad for grad in grads[4:])], model.trainable_variables)
        if (step + 1) % every == 0 or step + 1 == plan.first_step(plan.epoch_of_step(step) + 1):
            for of in (lambda model: model.trainable_variables, lambda model: model.optimizer.momentums):
                for one, other in list(zip(*map(of, copies), strict=True))[:4]:
                    mean = (one.numpy() + other.numpy()) / 2
                    one.assign(mean)
                    other.assign(mean)
    trunk = [value.numpy() for value in copies[0].trainable_variables[:4]]
    heads = [value.numpy() for model in copies for value in model.trainable_variables[4:]]
    return {"trunk": trunk, "heads": heads}  # type: ignore[dict-item]  # lists


@pytest.mark.parametrize("every", [1, 3])
def test_it_is_plain_keras_models_whose_trunks_are_averaged(pair: tuple[str, str], tmp_path: Path, every: int) -> None:
    more: dict[str, Any] = {"model": "tests.training._tasks:seeded", "learning_rate": 0.05, "epochs": 2}
    config = config_of(pair, tmp_path / "run", 2, strategy="tasks", sync_every=every, **more)
    _threads.run(config)
    with precision("float64"):
        wanted = plain_copies(config, every)
    trunk, heads = heads_apart(weights_of(tmp_path / "run"))
    for mine, other in zip([*trunk, *heads], [*wanted["trunk"], *wanted["heads"]], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("ranks", "model"), [(2, "mlp"), (4, "tests.training._tasks:seeded")], ids=["adam", "sgd"])
def test_with_a_meeting_in_each_step_it_is_one_sum(
    pair: tuple[str, str], tmp_path: Path, ranks: int, model: str
) -> None:
    """Adam too; the tasks have one and three parts of the rows."""
    more: dict[str, Any] = {"model": model, "max_steps": 6, "mix": (3, 1), "global_batch": 32}
    more |= {} if model == "mlp" else {"extra": {}}
    _threads.run(config_of(pair, tmp_path / "sum", 1, **more))
    _threads.run(config_of(pair, tmp_path / "tasks", ranks, strategy="tasks", **more))
    summed, grouped = (weights_of(tmp_path / name) for name in ("sum", "tasks"))
    assert len(summed) == 8
    for name, value in summed.items():
        np.testing.assert_allclose(grouped[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_four_ranks_are_two_whose_groups_have_all_rows(pair: tuple[str, str], tmp_path: Path) -> None:
    """The ranks of a task add their gradients in each step, so two of them are one with twice the rows."""
    more: dict[str, Any] = {"strategy": "tasks", "sync_every": 3, "epochs": 1}
    for ranks in (2, 4):
        _threads.run(config_of(pair, tmp_path / str(ranks), ranks, **more))
    two, four = (_threads.final_tensors(str(tmp_path / str(ranks))) for ranks in (2, 4))
    assert_same(two, four)


@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=9, max_size=9), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_task_s_ranks_get_the_mean_of_their_rows(tasks: int, each: int, rows: list[int], seed: int) -> None:
    """An output layer gets the mean times the task's share of all rows; each of any number of rows a rank."""
    ranks, total = tasks * each, sum(rows[: tasks * each])
    grads = np.random.default_rng(seed).standard_normal((ranks, 2, 4))
    names = ["the gradient of mlp/dense/kernel", "the gradient of _task_0/kernel"]

    def work(comm: Communicator) -> list[Any]:
        mine = comm.rank // each
        exchange = TaskExchange(
            comm, rows[comm.rank] / total, members=range(mine * each, (mine + 1) * each), heads=["_task_0", "_task_1"]
        )
        dtype = np.dtype("float64")
        exchange.use(lay_out([((4,), dtype)] * 2, [], CONTROL_WORDS, BUCKET_BYTES), names)
        if exchange.alone:
            SoloExchange(exchange, names, []).finish(np.array(comm.rank, np.float64))
            found = [exchange.kept_factor(name) * grad for name, grad in zip(names, grads[comm.rank], strict=True)]
        else:
            layout = exchange._of_layout()
            for bucket in range(len(layout.sizes)):
                exchange.post(bucket, *(grads[comm.rank][number] for number in layout.posted(bucket)))
            found = [value.copy() for value in exchange.finish(np.array(comm.rank, np.float64))]
        assert exchange.agreement is not None and not exchange.agreement.agreed
        met = exchange.agree(equal=True)
        exchange.close()
        return [*found, met.losses]

    for rank, (trunk, head, losses) in enumerate(run_ring(ranks, work) if ranks > 1 else run_solo(1, work)):
        group = slice(rank // each * each, (rank // each + 1) * each)
        weights = np.array(rows[group])
        mean = np.average(grads[group], axis=0, weights=weights)
        np.testing.assert_allclose(trunk, mean[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(head, mean[1] * weights.sum() / total, rtol=1e-12, atol=1e-14)
        assert losses == pytest.approx((np.average(np.arange(ranks), weights=rows[:ranks]),))


@pytest.mark.parametrize("more", [{}, {"strategy": "tasks", "sync_every": 3}], ids=["sum", "tasks"])
def test_a_restart_changes_no_bit(pair: tuple[str, str], tmp_path: Path, more: dict[str, Any]) -> None:
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"model": "tests.training._tasks:failing", "checkpoint_every": 3, "validate": "test"}
    options |= {"precision": "float32", "tasks": "equal" if more else "uncertainty", **more}
    whole = _threads.run(config_of(pair, tmp_path / "whole", 2, **options))
    _models.FAIL_AT.update(step=14)
    broken = _threads.run(config_of(pair, tmp_path / "broken", 2, **options))
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))


def test_each_dataset_is_evaluated_by_its_output_layer(pair: tuple[str, str], tmp_path: Path) -> None:
    from lockstep.training.batches.training_set import TrainingSet
    from lockstep.training.models.on_disk import load_model
    from lockstep.training.reading.open import OpenSplit

    config = config_of(pair, tmp_path / "run", 4, strategy="tasks", precision="float32", epochs=8, validate="test")
    result = _threads.run(config)
    scored = evaluate(str(tmp_path / "run"), pair[1], "test", _threads.run_threads)
    assert result.model is not None
    model = load_model(result.model, "mlp")
    opened = TrainingSet.at(pair, "train", (1, 1), tasks=True)
    wanted, outputs = [], []
    for number, url in enumerate(pair):
        split = OpenSplit.at(url, "test")
        rows = split.encoder.encode(split.reader.read(split.reader.table.run(0)))
        for block in range(1, split.reader.table.num_blocks):
            more = split.encoder.encode(split.reader.read(split.reader.table.run(block)))
            rows = type(rows)(
                {name: np.concatenate([rows.x[name], more.x[name]]) for name in rows.x},
                np.concatenate([rows.y, more.y]), np.concatenate([rows.sample_id, more.sample_id]),
            )  # fmt: skip
        x = {**rows.x, "_dataset": np.full(len(rows), number)}
        shares = np.asarray(model.predict_on_batch(x))
        assert shares.shape == (30, 3)
        assert number == 0 or shares[:, 2].max() == 0, "a class that the task does not have"
        outputs.append((rows.sample_id, shares))
        wanted.append(float((shares.argmax(axis=1) == rows.y).mean()))
    assert scored["metrics"]["accuracy"] == pytest.approx(wanted[1])
    assert {Path(one["dataset"]).name: one["metrics"]["accuracy"] for one in scored["by_dataset"]} == pytest.approx(
        {"sides": wanted[1], "kinds": wanted[0]}
    )
    assert result.metrics["val_accuracy_0"] == pytest.approx(wanted[0])
    assert result.metrics["val_accuracy"] == pytest.approx(np.mean(wanted))
    assert min(wanted) > 0.6 and opened.encoder.signature.tasks == (3, 2)

    ids, shares = outputs[1]
    done = predict(str(tmp_path / "run"), pair[1], "test", str(tmp_path / "out"), _threads.run_threads, num_ranks=2)
    found = pd.concat(map(pd.read_parquet, sorted(Path(done.output).glob("*.parquet"))))
    np.testing.assert_array_equal(found["sample_id"], ids)
    np.testing.assert_allclose(np.stack(found["prediction"].to_list()), shares, rtol=1e-5, atol=1e-7)
    assert set(found["class"]) == {0, 1} and found["class"].tolist() == shares.argmax(axis=1).tolist()
    with pytest.raises(ConfigError, match="takes no raw rows"):
        ExportedModel.at(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"mix": None}, "tasks"),
        ({"tasks": "1,2,3"}, "tasks"),
        ({"tasks": "1,0"}, "tasks"),
        ({"tasks": "even"}, "tasks"),
        ({"strategy": "tasks", "tasks": "uncertainty"}, "tasks"),
        ({"strategy": "tasks", "tasks": None}, "tasks"),
        ({"strategy": "tasks", "num_ranks": 3}, "num_ranks"),
        ({"strategy": "tasks", "sync_every": 0}, "sync_every"),
        ({"strategy": "tasks", "sync_every": 2, "max_steps": 3}, "max_steps"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(more: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"`{option}`"):
        config_of(("a", "b"), Path("run"), more.pop("num_ranks", 2), **more)
