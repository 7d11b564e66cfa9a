"""Loss scaling on N ranks: what is not finite on one of them skips the step on all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._fit_ranks import fresh
from tests.training._fit_ranks import on_ranks as fit_on_ranks
from tests.training._own_steps import Learner, assert_as_one, batches, on_ranks

pytestmark = pytest.mark.slow
TWO = [slice(0, 3), slice(3, 12)]


@contextmanager
def policy(name: str) -> Iterator[None]:
    """Keras' global dtype policy meanwhile."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scaling(**inner: Any) -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(0.01, **inner), initial_scale=64.0, dynamic_growth_steps=3
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(wrong: float) -> None:
    data = batches(8)
    data[4][0][7, 2] = wrong  # a row of rank 1
    plain = Learner(scaling(clipnorm=1.0))
    plain.run(data)
    ranks, seen = on_ranks(lambda: scaling(clipnorm=1.0), data, TWO)
    assert_as_one(plain, ranks)
    for rank in seen:
        assert [agreement.skipped for _, agreement in rank] == [number == 4 for number in range(8)]
        assert [agreement.step for _, agreement in rank] == list(range(1, 9)), "a skipped step is a step of the run"
    assert float(ranks[1].optimizer.dynamic_scale.numpy()) == 64.0 * 2 / 2 * 2  # grew, fell, grew again


def test_a_cycle_of_micro_batches_is_skipped_as_a_whole() -> None:
    data = batches(9)
    spoilt = [(x.copy(), y) for x, y in data]
    spoilt[4][0][1, 0] = np.nan  # the second micro-batch of the second cycle of three, on rank 0
    plain = Learner(scaling(gradient_accumulation_steps=3))
    plain.run([*data[:3], *data[6:]])  # without the second cycle
    ranks, seen = on_ranks(lambda: scaling(gradient_accumulation_steps=3), spoilt, TWO)
    for learner in (plain, *ranks):
        learner.optimizer.dynamic_scale.assign(1.0)
        learner.optimizer.step_counter.assign(0)
    assert_as_one(plain, ranks)
    for rank in seen:
        assert [pending for pending, _ in rank] == [1, 2, 0] * 3
        ended = [agreement for pending, agreement in rank if pending == 0]
        assert [(agreement.step, agreement.skipped, agreement.batches) for agreement in ended] == [
            (1, False, 3),
            (2, True, 3),
            (3, False, 3),
        ]


def fit_two(
    policy_name: str, *, compiled_first: bool, spoilt_step: int | None
) -> tuple[list[Any], list[list[Any]], list[list[Any]]]:
    """Two ranks' models after four steps of `fit`; what they agreed on after each; their moving means then."""
    import keras

    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.distribute import distribute, exchange_of, undistribute
    from lockstep.training.steps.own_fit import rank_step

    comms = _threads._join(2, 1)
    models = []
    x = np.random.default_rng(0).standard_normal((4, 8, 5)).astype(np.float32) / 4  # small: the first scale is 2^15
    y = np.tanh(x.sum(axis=-1, keepdims=True))
    if spoilt_step is not None:
        x[spoilt_step, 6] = 1e5  # a row of rank 1: infinite in float16, so the averages meet it in the forward pass
    with policy(policy_name):
        for comm in comms:
            keras.utils.clear_session()  # which forgets the policy too
            keras.config.set_dtype_policy(policy_name)
            keras.utils.set_random_seed(1)
            layers = [keras.layers.BatchNormalization(), keras.layers.Dense(7, "relu"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((5,)), *layers])
            optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
            if not compiled_first:
                optimizer = distribute(optimizer, comm, statistics=statistics_of(model))
            model.compile(optimizer, "mse", jit_compile=False)
            if compiled_first:
                assert distribute(model.optimizer, comm) is model.optimizer
            # Over all ranks, an overflow reaches all in the forward pass; else when the averages are summed.
            rank_step(model, comm, batchnorm="sync" if compiled_first else "local")
            models.append(model)

        means: list[list[Any]] = [[], []]

        def one(rank: int) -> list[Any]:
            exchange, seen = exchange_of(models[rank].optimizer), []

            def note(batch: int, logs: Any = None) -> None:
                seen.append(exchange.agreement)
                means[rank].append(models[rank].layers[0].moving_mean.numpy())

            watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
            rows = slice(0, 4) if rank == 0 else slice(4, 8)
            inputs, targets = (part[:, rows].reshape(16, -1) for part in (x, y))
            try:
                models[rank].fit(inputs, targets, batch_size=4, shuffle=False, verbose=0, callbacks=[watch])
            except BaseException as error:
                comms[rank].abort(str(error))
                raise
            finally:
                comms[rank].close()
            return seen

        with ThreadPoolExecutor(2) as pool:
            seen = list(pool.map(one, range(2)))
    for model in models:
        undistribute(model.optimizer)
    return models, seen, means


@pytest.mark.parametrize("compiled_first", [False, True])
def test_mixed_float16_through_compile_and_fit(compiled_first: bool) -> None:
    import keras

    models, seen, means = fit_two("mixed_float16", compiled_first=compiled_first, spoilt_step=2)
    assert all(type(model.optimizer) is keras.optimizers.LossScaleOptimizer for model in models)
    assert [agreement.skipped for agreement in seen[0]] == [False, False, True, False]
    assert [(a.step, a.skipped) for a in seen[0]] == [(a.step, a.skipped) for a in seen[1]]
    np.testing.assert_array_equal(means[0], means[1])
    moved = [not np.array_equal(old, new) for old, new in zip(means[0], means[0][1:], strict=False)]
    assert moved == [True, False, True], "a step that is skipped moves no average"
    assert all(0 < seen[0][step].loss < 10 for step in (0, 1, 3)), "the loss is told without its scale"
    for mine, other in zip(models[0].optimizer.variables, models[1].optimizer.variables, strict=True):
        assert np.array_equal(mine.numpy(), other.numpy()), mine.path
    for model in models:
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14
        assert int(model.optimizer.iterations.numpy()) == 3
    for mine, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        assert np.array_equal(mine, other)
        assert np.isfinite(mine).all()


def test_mixed_bfloat16_needs_no_scale() -> None:
    import keras

    models, seen, _ = fit_two("mixed_bfloat16", compiled_first=False, spoilt_step=None)
    assert all(type(model.optimizer) is keras.optimizers.Adam for model in models)
    assert seen[0] == seen[1]
    assert not any(agreement.skipped for agreement in seen[0])
    for mine, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        assert np.array_equal(mine, other)


def test_a_model_of_mixed_float16_that_was_made_under_another_policy_is_refused_by_compile() -> None:
    """The global policy says nothing of it: `distribute` cannot know, `compile` would wrap."""
    import keras

    from lockstep.storage.errors import ConfigError
    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps.distribute import distribute

    with policy("mixed_float16"):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match="cannot be inside another one"):
        model.compile(distribute(keras.optimizers.Adam(), SoloCommunicator()), "mse")


def test_a_skipped_cycle_leaves_moving_averages_as_they_were() -> None:
    """A good micro-batch and one that spoils the cycle, on ranks that own 2 and 4 ghost groups."""
    import keras

    def make() -> Any:
        keras.config.set_dtype_policy("mixed_float16")  # which clear_session forgets
        layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0), "mse")
        return model

    data = batches(2, "float32")
    data[1][0][7] = 1e5  # a row of rank 1
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    options: Any = {"shares": [slice(0, 4), slice(4, 12)], "steps": 1, "batches": 2}
    with policy("mixed_float16"):
        ranks = fit_on_ranks(make, x, y, group_rows=2, micro_batches=2, **options)
        new = fresh(make)
    for model in ranks:
        assert float(model.optimizer.dynamic_scale.numpy()) == 32.0
        for mine, other in zip(model.weights, new.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), other.numpy(), err_msg=mine.path)
