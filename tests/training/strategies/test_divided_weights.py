"""--zero 3: layers gather the weights that they need, and no bit differs from one sum in each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from tests.training._ring import run_ring
from tests.training._threads import run_threads  # noqa: F401 - sets the threads of TensorFlow

pytestmark = pytest.mark.slow
STEPS, ROWS, WORDS = 4, 8, 50


def attention() -> Any:
    """Words, attention with dropout, and a sum of two branches."""
    import keras

    inputs = keras.Input((9,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 12)(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 6, dropout=0.1)(x, x)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return inputs, keras.layers.Dense(3)(x)


def recurrent() -> Any:
    """A loop whose weights come from outside of it."""
    import keras

    inputs = keras.Input((9,), dtype="int32")
    x = keras.layers.GRU(7)(keras.layers.Embedding(WORDS, 12)(inputs))
    return inputs, keras.layers.Dense(3)(keras.layers.BatchNormalization()(x))


def shared() -> Any:
    """A layer that is called twice, a penalty on weights, and activations that TensorFlow joins with products."""
    import keras

    inputs = x = keras.Input((9,), dtype="int32")
    x = keras.layers.Dense(17, "tanh")(keras.layers.Rescaling(1 / WORDS)(x))
    twice = keras.layers.Dense(17, "relu", kernel_regularizer="l2")
    return inputs, keras.layers.Dense(3)(twice(twice(x)))


def stepped(make: Any, ranks: int, stage: int) -> list[tuple[list[np.ndarray], float, float]]:
    """Each rank's weights after STEPS steps, the loss of a test, and the bytes that the last step sent by those of all
    weights.
    """
    import keras
    import tensorflow as tf

    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.steps.rank_step import RankStep
    from lockstep.training.strategies.zero import BUFFERS, ZeroExchange

    models = []
    for _ in range(ranks):
        keras.utils.set_random_seed(3)
        model = keras.Model(*make())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
        models.append(model)

    def work(comm: Communicator) -> tuple[list[np.ndarray], float, float]:
        model, group = models[comm.rank], comm.group(range(ranks))
        group.choose = lambda nbytes: "ring"  # type: ignore[attr-defined] # of TCP
        more: dict[str, Any] = {"make_exchange": partial(ZeroExchange, stage=stage)} if stage else {}
        few: dict[str, Any] = {"bucket_bytes": 512, "rows_from_bytes": 1 << 40}
        distribute(model.optimizer, group, finalizes=False, same_start=False, **few, **more)
        exchange = exchange_of(model.optimizer)
        if isinstance(exchange, ZeroExchange):
            exchange.divide(model.optimizer, model.trainable_variables)
        RankStep(1 / ranks, seed=4, checked=True).install(model, comm.group(range(ranks)))
        weights = getattr(exchange, "weights", None)
        if weights is not None:
            weights.install(model)
        rng = np.random.default_rng(comm.rank)
        batch = tf.constant(rng.integers(0, WORDS, (ROWS, 9)), tf.int32), tf.constant(rng.integers(0, 3, ROWS))
        train = tf.function(lambda: model.train_step(batch), autograph=False)
        test = tf.function(lambda: model.test_step(batch), autograph=False)
        for _ in range(STEPS - 1):
            train()
        before = comm.sent_bytes
        train()
        sent = comm.sent_bytes - before
        model.reset_metrics()
        if comm.rank == 0:  # rank 0 alone has a batch to test
            test()
        if weights is None:
            found = [one.numpy() for one in model.trainable_variables]
        else:
            from lockstep.features.schema.signature import Signature, TensorSpec

            weights.serve(
                Served(model),
                Signature(features={"x": TensorSpec(shape=(9,), dtype="int32")}, label=None, num_classes=None),
            )
            with weights.gathered():
                found = list(weights._whole)
            assert isinstance(exchange, ZeroExchange) and len(exchange._spare) <= BUFFERS < len(exchange._bounds)
            with pytest.raises(ConfigError, match="only a part"):
                model.get_weights()
        exchange.close()
        size = sum(one.nbytes for one in found)
        score = float(model.get_metrics_result()["loss"])
        return [*found, *(one.numpy() for one in model.non_trainable_variables)], score, sent / size

    try:
        return run_ring(ranks, work)
    finally:
        keras.utils.clear_session()


class Served:
    """A model of one input, called with inputs by name."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: dict[str, Any], training: bool) -> Any:
        return self._model(inputs["x"], training=training)


@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (attention, 2),
        *(pytest.param(shared, ranks, marks=pytest.mark.soak) for ranks in (2, 3, 4)),
        *(pytest.param(recurrent, ranks, marks=pytest.mark.soak) for ranks in (2, 4)),
        *(pytest.param(attention, ranks, marks=pytest.mark.soak) for ranks in (3, 4)),
    ],
)
def test_no_bit_differs_from_one_sum_in_each_step(make: Any, ranks: int) -> None:
    whole, divided = (stepped(make, ranks, stage) for stage in (0, 3))
    for mine, other in zip(divided, whole, strict=True):
        for one, two in zip(mine[0], other[0], strict=True):
            assert one.tobytes() == two.tobytes()
    assert divided[0][1] == whole[0][1]


def wide() -> Any:
    import keras

    inputs = x = keras.Input((9,), dtype="int32")
    x = keras.layers.Rescaling(1 / WORDS)(x)
    for _ in range(3):
        x = keras.layers.Dense(300, "relu")(x)
    return inputs, keras.layers.Dense(3)(x)


def test_a_step_sends_weights_twice_and_gradients_once() -> None:
    assert np.mean([sent for *_, sent in stepped(wide, 2, 3)]) == pytest.approx(3 / 2, rel=0.02)
