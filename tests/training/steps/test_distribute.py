"""distribute(optimizer) inside Keras: what the optimizer sees, and what a saved model shows."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator, SoloCommunicator
from tests.training import _threads  # sets TensorFlow's threads before it makes them

pytestmark = pytest.mark.slow
ROWS = 12


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, 5)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.float32)


def fit_ranks(make: Any, shares: list[slice], **options: Any) -> list[Any]:
    """Models after three steps on the same twelve rows, shared out by `shares`."""
    from lockstep.training.steps.distribute import distribute, undistribute

    x, y = data()
    comms: list[Communicator] = _threads._join(len(shares), 1)
    models = [make() for _ in shares]
    for model, comm, share in zip(models, comms, shares, strict=True):
        model.optimizer.build(model.trainable_variables)
        distribute(model.optimizer, comm, scale=len(y[share]) / ROWS, **options)

    def one(model: Any, comm: Communicator, share: slice) -> None:
        model.fit(x[share], y[share], batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
        comm.close()

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(one, models, comms, shares))
    for model in models:
        undistribute(model.optimizer)
    return models


def small(optimizer: Any) -> Any:
    import keras

    def make() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        layers = [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1, "sigmoid")]
        model = keras.Sequential(layers)
        model.compile(optimizer(), "binary_crossentropy", jit_compile=False)
        return model

    return make


UNEVEN = [slice(0, 3), slice(3, 4), slice(4, 12)]


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.01},  # of the global gradient: clipping each rank's first gives another sum
        {"global_clipnorm": 0.01, "weight_decay": 0.1},
    ],
)
def test_uneven_ranks_step_like_plain_keras(options: dict[str, Any]) -> None:
    import keras

    make = small(lambda: keras.optimizers.SGD(0.5, momentum=0.9, **options))
    x, y = data()
    plain = make()
    plain.fit(x, y, batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
    ranks = fit_ranks(make, UNEVEN, bucket_bytes=64)
    for mine, *others in zip(plain.get_weights(), *(model.get_weights() for model in ranks), strict=True):
        np.testing.assert_allclose(others[0], mine, rtol=1e-5, atol=1e-6)
        assert all(np.array_equal(others[0], other) for other in others[1:]), "ranks differ in a bit"


def test_sparse_and_absent_gradients_and_ema() -> None:
    import keras

    class Odd(keras.Model):
        """An embedding (sparse gradient) and a variable that the loss never sees."""

        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(4, 3)
            self.unused = keras.layers.Dense(2)
            self.out = keras.layers.Dense(1, "sigmoid")

        def call(self, x: Any) -> Any:
            self.unused(x)
            return self.out(keras.ops.mean(self.table(keras.ops.cast(x > 0, "int32")), axis=1))

    def make() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = Odd()
        model.compile(keras.optimizers.SGD(0.5, use_ema=True), "binary_crossentropy", jit_compile=False)
        model(data()[0])
        return model

    x, y = data()
    plain = make()
    plain.fit(x, y, batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
    averages = [np.asarray(v) for v in plain.trainable_variables]
    from lockstep.training.steps.distribute import finalize

    first, second = fit_ranks(make, [slice(0, 5), slice(5, 12)], finalizes=False)
    assert [v.tolist() for v in first.get_weights()] == [v.tolist() for v in second.get_weights()]
    assert not np.allclose(averages[0], first.trainable_variables[0]), "averages are taken at the run's end alone"
    from lockstep.training.steps.distribute import distribute

    distribute(first.optimizer, SoloCommunicator(), scale=1.0)
    finalize(first.optimizer, first.trainable_variables)
    for mine, average in zip(first.trainable_variables, averages, strict=True):
        np.testing.assert_allclose(np.asarray(mine), average, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_keeps_its_gradients_keeps_them() -> None:
    """TensorFlow lets a variable share an assigned array's memory; the exchange must not write over it."""
    import keras

    class Keeps(keras.optimizers.SGD):
        """Remembers the gradient of the step before, and uses it."""

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            last = self.last[self._get_variable_index(variable)]
            self.assign_sub(variable, (gradient + 0.5 * last) * learning_rate)
            self.assign(last, gradient)

    make = small(lambda: Keeps(0.5))
    x, y = data()
    plain = make()
    plain.fit(x, y, batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
    ours, _ = fit_ranks(make, [slice(0, 6), slice(6, 12)])
    for mine, other in zip(plain.optimizer.variables, ours.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-5, atol=1e-7, err_msg=mine.path)


def test_a_model_saved_during_training_loads_without_lockstep(tmp_path: Path) -> None:
    import keras

    from lockstep.training.steps.distribute import distribute, exchange_of

    model = small(lambda: keras.optimizers.Adam(0.1))()
    distribute(model.optimizer, SoloCommunicator(), scale=1.0)
    model.fit(*data(), verbose=0)
    assert exchange_of(model.optimizer).step == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert isinstance(model.optimizer, keras.optimizers.Adam)


def test_no_gradient_at_all_is_what_keras_says_of_it() -> None:
    import keras

    from lockstep.training.steps.distribute import distribute
    from tests.training._ring import run_ring

    def one(comm: Communicator) -> None:
        variable = keras.Variable(np.ones(3))
        optimizer = distribute(keras.optimizers.SGD(), comm)
        optimizer.apply([], [])
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply([None], [variable])

    run_ring(2, one)


def test_what_cannot_be_distributed() -> None:
    import keras

    from lockstep.training.steps.distribute import distribute

    optimizer = distribute(keras.optimizers.SGD(), SoloCommunicator())
    with pytest.raises(ConfigError, match="already"):
        distribute(optimizer, SoloCommunicator())
    with pytest.raises(ConfigError, match="inside another one"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(ConfigError, match="inside another one"):
        keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"communicator": 0}, "communicator"),
        ({"scale": float("nan")}, "scale"),  # would make every gradient NaN
        ({"scale": -0.5}, "scale"),
        ({"scale": "half"}, "scale"),
        ({"statistics": [1.0]}, "statistics"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"rows_from_bytes": -1}, "rows_from_bytes"),
    ],
)
def test_arguments_that_cannot_be_right(arguments: dict[str, Any], name: str) -> None:
    import keras

    from lockstep.training.steps.distribute import distribute

    with pytest.raises(ConfigError, match=f"`{name}` of distribute is invalid"):
        distribute(**{"optimizer": keras.optimizers.SGD(), "communicator": SoloCommunicator(), **arguments})


def test_statistics_may_be_an_iterator() -> None:
    import keras

    from lockstep.training.steps.distribute import distribute, undistribute

    mean = keras.Variable(np.zeros(3, np.float32))
    optimizer: Any = distribute(keras.optimizers.SGD(), SoloCommunicator(), statistics=iter([mean]))  # type: ignore[arg-type]  # a user's mistake
    assert optimizer._lockstep.reduction.statistics == (mean,)
    undistribute(optimizer)


def test_a_rate_that_is_a_lambda_is_the_same_wherever_its_script_lies(tmp_path: Path) -> None:
    """Keras tells a lambda by its code, in which the path of its file is, and each executor has a folder of its own."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.distribute import distribute
    from tests.training._ring import run_ring

    def one(comm: Communicator) -> None:
        file = tmp_path / f"{comm.rank}.py"
        file.write_text("rate = lambda: 0.1")
        rate = runpy.run_path(str(file))["rate"]
        for _ in range(2):
            kernel = keras.Variable(np.ones(2, np.float32))
            optimizer = distribute(keras.optimizers.SGD(rate), comm)
            optimizer.apply([tf.ones(2)], [kernel])
            np.testing.assert_allclose(kernel.numpy(), 0.9, rtol=1e-6)
            file.unlink(missing_ok=True)  # the second time Keras finds no source, which it asks for

    run_ring(2, one)


def test_ranks_that_begin_apart_are_told_on_all() -> None:
    """They would take the same sums from other weights, or with another rate, and never meet."""
    import keras
    import tensorflow as tf

    from lockstep.training.steps.distribute import distribute
    from tests.training._ring import run_ring

    def step(comm: Communicator, rate: float, weight: float, **options: Any) -> None:
        with tf.init_scope():
            kernel = keras.Variable([1.0, weight], name="kernel")
            optimizer = distribute(keras.optimizers.SGD(rate), comm, **options)
            optimizer.build([kernel])
        optimizer.apply([tf.ones(2)], [kernel])

    def one(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"rank 1 begins with other weights than rank 0\n  got: kernel.*1 of 1"):
            step(comm, 0.1, 2.0 + comm.rank)
        with pytest.raises(ConfigError, match=r"rank 1 has another optimizer .*\n.*rate\":0\.2.*\n.*rate\":0\.1"):
            step(comm, 0.1 * (1 + comm.rank), 2.0)
        with pytest.raises(ConfigError, match="rank 1 has another optimizer than rank 0"):
            tf.function(step, autograph=False)(comm, 0.1 * (1 + comm.rank), 2.0)  # read while a step is traced
        with pytest.raises(ConfigError, match=r"do not add up to 1.*\n  got: 1.5 = 0.5 \+ 1"):
            step(comm, 0.1, 2.0, scale=0.5 + 0.5 * comm.rank)
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
        long = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(schedule, weight_decay=0.1 + comm.rank))
        with pytest.raises(ConfigError, match=r"got: .*decay\":1\.1.*\n.*decay\":0\.1"):  # behind all that is equal
            distribute(long, comm).apply([tf.ones(2)], [keras.Variable(np.ones(2, np.float32))])
        step(comm, 0.1, 2.0 + comm.rank, same_start=False)  # as a script that broadcasts after its first step
        step(comm, 0.1, 2.0)

    run_ring(2, one)


def test_a_step_that_was_traced_before_undistribute_says_so() -> None:
    """Its exchange has no thread any more: it would wait for its sums to the deadline."""
    import keras

    from lockstep.training.steps.distribute import distribute, undistribute
    from tests.training._ring import run_ring

    def one(comm: Communicator) -> None:
        variable = keras.Variable(np.ones(3, np.float32))
        optimizer = distribute(keras.optimizers.SGD(), comm)
        assert type(type(optimizer).from_config(optimizer.get_config())) is keras.optimizers.SGD
        step = tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]))
        step()
        undistribute(optimizer)
        with pytest.raises(tf.errors.UnknownError, match="Compile the model again after undistribute"):
            step()

    import tensorflow as tf

    run_ring(2, one)
