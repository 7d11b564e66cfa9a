"""--delay: each step applies the sum of an earlier one, exactly, at any number of ranks and through restarts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.exchange.agreement import NonFiniteError
from lockstep.training.exchange.buckets import lay_out
from lockstep.training.results.audit import check_run_audit
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._ring import run_ring, run_solo
from tests.training._tiny import write_images, write_table
from tests.training.rank.test_fit import assert_no_bit_differs, assert_same, assert_same_result, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
DELAY, STEPS, ROWS = 2, 6, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    write_table(folder / "table", records={"train": 200, "test": 30})
    write_images(folder / "images", records={"train": 200, "test": 30})
    return {"table": str(folder / "table"), "images": str(folder / "images")}


def late(comm: Communicator, model: Any, scale: float | None = None) -> Any:
    """The strategy of a model whose optimizer is late by DELAY steps; tables go by rows."""
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.strategies.delay import Delayed, DelayedExchange

    make = partial(DelayedExchange, delay=DELAY)
    distribute(model.optimizer, comm, scale, rows_from_bytes=0, bucket_bytes=64, make_exchange=make, finalizes=False)
    exchange = exchange_of(model.optimizer)
    assert isinstance(exchange, DelayedExchange)
    return Delayed(model, exchange)


def model_of() -> Any:
    import keras

    table = keras.layers.Embedding(ROWS, 2, embeddings_initializer="zeros")
    layers = [keras.Input((1,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(3, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def gradients(model: Any, step: int, rank: int) -> list[Any]:
    """Those of a step on a rank: the table's by rows, row 0 and one other."""
    import tensorflow as tf

    found: list[Any] = []
    for number, variable in enumerate(model.trainable_variables):
        value = np.full(variable.shape, step * 10.0 + rank + number, np.float32)
        rows = np.array([0, step % (ROWS - 1) + 1])
        whole = tf.constant(value)
        found.append(whole if number else tf.IndexedSlices(tf.gather(whole, rows), rows, tf.constant(value.shape)))
    return found


def applied(model: Any, comm: Communicator, steps: range) -> list[np.ndarray]:
    for step in steps:
        model.optimizer.apply(gradients(model, step, comm.rank), model.trainable_variables)
    return [np.asarray(variable.numpy()) for variable in model.trainable_variables]


def expected(start: list[np.ndarray], ranks: int, steps: range) -> list[np.ndarray]:
    """Plain SGD with rate 1 on the means over ranks of these steps."""
    found = [value.copy() for value in start]
    for step in steps:
        mean = step * 10.0 + np.arange(ranks).mean()
        for number, value in enumerate(found):
            touched: Any = slice(None) if number else [0, step % (ROWS - 1) + 1]
            value[touched] -= np.float32(mean + number)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_applies_the_sum_of_an_earlier_one_and_a_checkpoint_has_the_rest(ranks: int) -> None:
    import keras

    models = [model_of() for _ in range(2 * ranks)]
    start = [np.asarray(variable.numpy()) for variable in models[0].trainable_variables]
    for model in models:
        for variable, value in zip(model.trainable_variables, start, strict=True):
            variable.assign(value)

    def work(comm: Communicator) -> None:
        model, other = models[2 * comm.rank : 2 * comm.rank + 2]
        strategy, found = late(comm, model), start
        for step in range(1, STEPS + 1):
            found = applied(model, comm, range(step, step + 1))
            wanted = expected(start, ranks, range(1, step + 1 - DELAY))
            assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), step
            assert model.optimizer.iterations.numpy() == max(0, step - DELAY)
        state = strategy.state()
        assert {name.split("/")[1] for name in state} == {str(step) for step in range(STEPS - DELAY + 1, STEPS + 1)}
        resumed = late(comm.group(range(ranks)), other)
        for variable, value in zip(other.trainable_variables, found, strict=True):
            variable.assign(value)
        resumed.load(state, "here")
        strategy.finish()  # the end of a run
        whole = [np.asarray(variable.numpy()) for variable in model.trainable_variables]
        assert all(map(np.array_equal, whole, expected(start, ranks, range(1, STEPS + 1))))
        more = applied(other, comm, range(STEPS + 1, STEPS + 3))
        assert all(map(np.array_equal, more, whole)), "the sums under way come first"
        strategy._exchange.close()
        resumed._exchange.close()

    (run_solo if ranks == 1 else run_ring)(ranks, work)
    keras.utils.clear_session()


def test_a_gradient_that_is_not_finite_is_named_with_its_step() -> None:
    import tensorflow as tf

    models = [model_of() for _ in range(2)]
    for model in models:
        model.set_weights(models[0].get_weights())

    def work(comm: Communicator) -> None:
        model = models[comm.rank]
        late(comm, model)
        applied(model, comm, range(1, 3))
        wrong = gradients(model, 3, comm.rank)
        if comm.rank == 1:
            wrong[1] = wrong[1] * np.float32(np.inf)
        model.optimizer.apply(wrong, model.trainable_variables)
        before = applied(model, comm, range(4, 5))
        with pytest.raises((NonFiniteError, tf.errors.OpError), match=r"step 3: the gradient of .* is not finite"):
            applied(model, comm, range(5, 6))
        assert all(map(np.array_equal, model.get_weights(), before)), "none has applied it"

    run_ring(2, work)


def test_words_share_no_bucket_with_gradients_if_they_are_to_be_sent_first() -> None:
    float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    gradients = [((3,), float32), ((4,), float32)]
    together = lay_out(gradients, [((2,), float32)], 5)
    apart = lay_out(gradients, [((2,), float32)], 5, apart=True)
    assert (len(together.sizes), together.first_tail) == (1, 0)
    assert (len(apart.sizes), apart.first_tail) == (2, 1)
    assert {slot.bucket for slot in (*apart.statistics, apart.control)} == {1}
    assert lay_out([((3,), float64)], [], 5, apart=True).dtypes == (float64, float32)


@pytest.mark.parametrize(
    "more", [{"canonical": True}, {"precision": "mixed_float16"}, {"non_finite": "skip"}, {"micro_batches": 2}]
)
def test_what_assumes_sums_in_time_is_refused(more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "logistic", "num_ranks": 2, "global_batch": 8, "epochs": 1, **more}
    TrainConfig(datasets=("data",), run="run", **options)
    with pytest.raises(ConfigError, match="delay"):
        TrainConfig(datasets=("data",), run="run", delay=1, **options)


def test_a_restart_changes_no_bit(data: dict[str, str], tmp_path: Path) -> None:
    """Killed between two checkpoints, with dropout and callbacks; sums are under way in each checkpoint."""
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 7, "audit": True, "delay": 2, "epochs": 3}
    whole = train(data["table"], tmp_path / "whole", 2, f"{OWN}:with_callbacks", **options)
    _models.FAIL_AT.update(step=18)
    broken = train(data["table"], tmp_path / "broken", 2, f"{OWN}:with_callbacks", **options)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok
    state = _threads.final_tensors(str(tmp_path / "broken"))
    assert {name.split("/")[1] for name in state if name.startswith("delayed/")} == {"24", "25"}


def test_other_numbers_of_ranks_train_the_same_and_the_export_has_all_sums(
    data: dict[str, str], tmp_path: Path
) -> None:
    import keras

    options: dict[str, Any] = {"precision": "float64", "learning_rate": 0.05, "lanes": 8, "delay": 1, "epochs": 1}
    alone = train(data["images"], tmp_path / "one", 1, f"{OWN}:small_conv", **options)
    train(data["images"], tmp_path / "many", 3, f"{OWN}:small_conv", max_steps=4, **options)
    together = train(data["images"], tmp_path / "many", 2, f"{OWN}:small_conv", **options)
    mine, other = (_threads.final_tensors(str(tmp_path / name)) for name in ("one", "many"))
    assert_same(mine, other)
    assert_same_result(alone, together)
    exports = [next((tmp_path / name).rglob("model.keras")) for name in ("one", "many")]
    weights = [keras.models.load_model(path).get_weights() for path in exports]
    assert all(np.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*weights, strict=True))
    stored = [value for name, value in mine.items() if name.startswith("weights/")]
    assert any(not np.allclose(a, b, atol=1e-7) for a, b in zip(weights[0], stored, strict=True)), "one sum more"
