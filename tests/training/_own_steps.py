"""Training steps without a Keras model, as its `train_step` takes them: hundreds of steps for what one `fit` costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.training import _threads  # sets TensorFlow's threads before it makes them

ROWS = 12
Batch = tuple[np.ndarray, np.ndarray]
Make = Callable[[], Any]


def batches(count: int, dtype: str = "float64") -> list[Batch]:
    """`count` batches of 12 rows: x (12, 5), y (12, 1)."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((count, ROWS, 5)).astype(dtype)
    return [(part, np.sin(part.sum(axis=1, keepdims=True)) + 0.1) for part in x]


class Learner:
    """Two dense layers' variables and a compiled step; `dtype` of the variables."""

    shapes: tuple[tuple[int, ...], ...] = ((5, 7), (7,), (7, 1), (1,))

    def __init__(self, optimizer: Any, dtype: str = "float64", *, eager: bool = False) -> None:
        import keras
        import tensorflow as tf

        rng = np.random.default_rng(1)
        self.weights = [
            keras.Variable(rng.standard_normal(shape) * 0.5, dtype=dtype, name=f"{'b' if len(shape) == 1 else 'w'}{i}")
            for i, shape in enumerate(self.shapes)
        ]
        self.optimizer = optimizer
        optimizer.build(self.weights)
        self.step = self._step if eager else tf.function(self._step, autograph=False)

    def loss(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        w1, b1, w2, b2 = (weight.value for weight in self.weights)
        return tf.reduce_mean(tf.square(tf.tanh(x @ w1 + b1) @ w2 + b2 - y))

    def _step(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
            scaled = self.optimizer.scale_loss(loss)
        values = [weight.value for weight in self.weights]
        self.optimizer.apply(tape.gradient(scaled, values), self.weights)
        return loss

    def run(self, data: Sequence[Batch], rows: slice = slice(None)) -> list[float]:
        """The local loss of each step."""
        import tensorflow as tf

        return [float(self.step(tf.constant(x[rows]), tf.constant(y[rows]))) for x, y in data]

    def state(self) -> list[Any]:
        """All weights and optimizer variables."""
        return [*self.weights, *self.optimizer.variables]


def on_ranks(
    make: Make,
    data: Sequence[Batch],
    shares: Sequence[slice],
    *,
    learner: Callable[..., Learner] = Learner,
    **more: Any,
) -> tuple[list[Learner], list[list[Any]]]:
    """The learners of all ranks after their parts of `data`, and what each rank's exchange agreed on after each batch.

    `more` are options of distribute. The first rank's exception is raised.
    """
    from lockstep.training.steps.distribute import distribute, exchange_of, undistribute

    comms = _threads._join(len(shares), 1)
    learners = []
    for comm, share in zip(comms, shares, strict=True):
        scale = (share.stop - share.start) / ROWS
        learners.append(learner(make()))
        learners[-1].optimizer = distribute(learners[-1].optimizer, comm, scale, **more)

    def one(rank: int) -> list[Any]:
        exchange, seen = exchange_of(learners[rank].optimizer), []
        try:
            for batch in data:
                learners[rank].run([batch], shares[rank])
                seen.append((exchange.pending, exchange.agreement))
            return seen
        except BaseException as error:
            comms[rank].abort(str(error))
            raise exchange.error or error from error
        finally:
            comms[rank].close()

    with ThreadPoolExecutor(len(shares)) as pool:
        seen = [future.result() for future in [pool.submit(one, rank) for rank in range(len(shares))]]
    for one_learner in learners:
        undistribute(one_learner.optimizer)
    return learners, seen


def assert_as_one(plain: Learner, ranks: Sequence[Learner], tolerance: float = 1e-9) -> None:
    """Every rank's weights and optimizer state are the plain learner's; ranks are equal bit for bit."""
    for variable, *others in zip(plain.state(), *(learner.state() for learner in ranks), strict=True):
        mine, *values = (np.asarray(each.numpy()) for each in (variable, *others))
        assert all(np.array_equal(values[0], value) for value in values[1:]), f"ranks differ in {variable.path}"
        worst = float(np.max(np.abs(mine - values[0]), initial=0.0))
        assert worst <= tolerance * max(float(np.max(np.abs(mine), initial=0.0)), 1e-3), (variable.path, worst)
