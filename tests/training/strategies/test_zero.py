"""--zero: each rank holds and updates its part; weights and checkpoints are those of one sum in each step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.exchange.agreement import NonFiniteError
from lockstep.training.results.audit import check_run_audit
from tests.training._ring import run_ring
from tests.training.rank.test_fit import assert_no_bit_differs, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
STEPS = 5
SHAPES = ((7, 5), (), (5,), (33,), (3, 3, 2, 5), (1,))
"""Pieces begin and end anywhere, and some ranks have none of a variable."""
Tensors = dict[str, np.ndarray]


def model_of(make: Callable[[], Any], shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Any:
    """A model with variables of these shapes, whose optimizer is not built."""
    import keras

    class Weights(keras.layers.Layer):
        def build(self, _shape: Any) -> None:
            rng = np.random.default_rng(5)
            for number, shape in enumerate(shapes):
                self.add_weight(shape=shape, name=f"w{number}").assign(rng.standard_normal(shape))

        def call(self, x: Any) -> Any:
            return x

    model = keras.Sequential([keras.Input((1,)), Weights(name="weights")], name="model")
    model.compile(make(), "mse", jit_compile=False)
    return model


@contextmanager
def exchanging(comm: Communicator, model: Any, stage: int, bucket_bytes: int = 256) -> Iterator[Any]:
    """The exchange of a model whose optimizer is distributed over the ranks, and built."""
    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.strategies.zero import ZeroExchange, check_optimizer

    more: dict[str, Any] = {"make_exchange": partial(ZeroExchange, stage=stage)} if stage else {}
    distribute(model.optimizer, comm, bucket_bytes=bucket_bytes, finalizes=False, **more)
    exchange = exchange_of(model.optimizer)
    if isinstance(exchange, ZeroExchange):
        check_optimizer(model)
        exchange.divide(model.optimizer, model.trainable_variables)
    else:
        model.optimizer.build(model.trainable_variables)
    try:
        yield exchange
    finally:
        exchange.close()


def gradients(model: Any, step: int, rank: int, size: float = 1.0) -> list[Any]:
    import tensorflow as tf

    rng = np.random.default_rng([step, rank])
    return [tf.constant(size * rng.standard_normal(one.shape), one.dtype) for one in model.trainable_variables]


def applied(model: Any, comm: Communicator, steps: int = STEPS, *, size: float = 1.0, eager: bool = False) -> None:
    import tensorflow as tf

    def apply(*grads: Any) -> None:
        model.optimizer.apply(list(grads), model.trainable_variables)

    step = apply if eager else tf.function(apply, autograph=False)
    for number in range(steps):
        step(*gradients(model, number, comm.rank, size))


def everything(model: Any, comm: Communicator) -> Tensors | None:
    """Weights and the whole optimizer's state, on rank 0."""
    from lockstep.training.steps.model_state import OPTIMIZER, WEIGHTS, whole_state

    state = whole_state(model, comm, WEIGHTS, OPTIMIZER)
    if state is None:
        return None
    # Keras numbers the names of optimizers.
    return {re.sub(r"(?<=\d{4})/[^/]+", "", name): one for name, one in state.items()}


def assert_no_bit(mine: Tensors, other: Tensors) -> None:
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name


def trained(
    make: Callable[[], Any], ranks: int, *, size: float = 1.0, eager: bool = False, **more: Any
) -> list[Tensors]:
    """What one sum in each step, stage 1 and stage 2 end with."""
    import keras

    models = [[model_of(make) for _ in range(ranks)] for _ in range(3)]

    def work(comm: Communicator) -> list[Tensors | None]:
        found = []
        for stage in range(3):
            model, group = models[stage][comm.rank], comm.group(range(ranks))
            with exchanging(group, model, stage, **more):
                applied(model, group, size=size, eager=eager)
                found.append(everything(model, comm))
        return found

    found = run_ring(ranks, work)[0]
    keras.utils.clear_session()
    return found


def rate() -> Any:
    import keras

    return keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)


def adam_w() -> Any:
    import keras

    optimizer = keras.optimizers.AdamW(rate(), weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["w3"])
    return optimizer


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"clipvalue": 0.3}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", None),
        ("Adagrad", {}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Lion", {}),
        ("Adam", {"global_clipnorm": 1e6}),  # which never clips: else its norm has other last bits
    ],
)
def test_no_bit_differs_from_one_sum_in_each_step(name: str, options: dict[str, Any] | None, ranks: int) -> None:
    import keras

    def make() -> Any:
        return adam_w() if options is None else getattr(keras.optimizers, name)(rate(), **options)

    whole, *divided = trained(make, ranks, eager=ranks == 3)
    assert sum(name.startswith("optimizer/") for name in whole) >= 1
    for found in divided:
        assert_no_bit(whole, found)


def test_a_momentum_that_follows_the_rate_is_corrected_once_a_step() -> None:
    from lockstep.training.steps.optimizers import CorrectedSGD

    whole, *divided = trained(lambda: CorrectedSGD(rate(), momentum=0.9), 2)
    for found in divided:
        assert_no_bit(whole, found)


def test_the_norm_of_all_parts_clips_each() -> None:
    import keras

    whole, *divided = trained(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5), 3, size=10.0)
    plain = trained(lambda: keras.optimizers.SGD(0.1), 3, size=10.0)[0]
    for found in divided:
        for key, value in whole.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
    assert any(not np.allclose(plain[key], value, rtol=1e-2) for key, value in whole.items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_holds_and_sends(ranks: int) -> None:
    """The optimizer's numbers are its part of all; a step sends as many bytes as an all-reduce by a ring."""
    import keras

    shapes = ((1500, 200), (1500, 200), (1000, 300), (7,))
    models = [[model_of(keras.optimizers.Adam, shapes) for _ in range(ranks)] for _ in range(3)]

    def work(comm: Communicator) -> list[tuple[int, int, int]]:
        found = []
        for stage in range(3):
            model, group = models[stage][comm.rank], comm.group(range(ranks))
            group.choose = lambda nbytes: "ring"  # type: ignore[attr-defined] # of TCP
            with exchanging(group, model, stage, bucket_bytes=1 << 20) as exchange:
                applied(model, group, 1)
                began = exchange.sent_bytes
                applied(model, group, 4)
                state = sum(variable.value.numpy().nbytes for variable in model.optimizer.variables)
                buffers = sum(one.nbytes for one in getattr(exchange, "_memory", {}).values())
                found.append((state, (exchange.sent_bytes - began) // 4, buffers))
        return found

    weights = 4 * sum(int(np.prod(shape)) for shape in shapes)
    for rank, found in enumerate(run_ring(ranks, work)):
        (whole, sent, _), *divided = found
        assert whole == pytest.approx(2 * weights, rel=0.001)
        for state, sent_too, _ in divided:
            assert state == pytest.approx(2 * weights / ranks, rel=0.01), rank
            assert sent_too == pytest.approx(2 * (ranks - 1) / ranks * weights, rel=0.02)
            assert sent_too == pytest.approx(sent, rel=0.02)
        assert divided[0][2] == pytest.approx(weights, rel=0.01), "a buffer for each bucket"
    keras.utils.clear_session()


def test_the_second_stage_has_three_buffers_whatever_the_model() -> None:
    import keras

    shapes = ((256,),) * 40  # a bucket each
    models = [model_of(keras.optimizers.Adam, shapes) for _ in range(2)]

    def work(comm: Communicator) -> list[int]:
        with exchanging(comm, models[comm.rank], 2, bucket_bytes=1024) as exchange:
            applied(models[comm.rank], comm)
            return [one.nbytes for one in exchange._memory.values()]

    for found in run_ring(2, work):
        assert sorted(found)[:3] == [1024] * 3 and len(found) == 4, "one more for the words"
    keras.utils.clear_session()


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing() -> None:
    import keras
    import tensorflow as tf

    models = [model_of(keras.optimizers.Adam) for _ in range(3)]
    start = models[0].get_weights()

    def work(comm: Communicator) -> None:
        model = models[comm.rank]
        with exchanging(comm, model, 2):
            wrong = gradients(model, 0, comm.rank)
            if comm.rank == 1:
                wrong[4] = tf.tensor_scatter_nd_update(wrong[4], [[2, 1, 0, 3]], [np.inf])
            with pytest.raises((NonFiniteError, tf.errors.OpError), match=r"w4 is not finite.*|w4") as caught:
                model.optimizer.apply(wrong, model.trainable_variables)
            assert "rank 1: the gradient of model/weights/w4" in str(caught.value)
        assert all(map(np.array_equal, model.get_weights(), start))

    run_ring(3, work)
    keras.utils.clear_session()


def refused(model: Any) -> ConfigError:
    from lockstep.training.steps.distribute import distribute
    from lockstep.training.strategies.zero import check_optimizer

    def work(comm: Communicator) -> ConfigError:
        distribute(model.optimizer, comm)
        with pytest.raises(ConfigError) as caught:
            check_optimizer(model)
        return caught.value

    from tests.training._ring import run_solo

    return run_solo(1, work)[0]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("Lamb", {}, "Lamb"),
        ("Muon", {}, "Muon"),
        ("Adafactor", {}, "Adafactor"),
        ("Nadam", {}, "Nadam"),
        ("Adam", {"clipnorm": 1.0}, "Adam with clipnorm"),
        ("Adam", {"use_ema": True}, "Adam with use_ema"),
    ],
)
def test_an_update_that_needs_whole_tensors_is_refused(name: str, options: dict[str, Any], named: str) -> None:
    import keras

    error = refused(model_of(lambda: getattr(keras.optimizers, name)(0.1, **options)))
    assert error.got == named and "SGD, Adam, AdamW, Adagrad, RMSprop, Lion" in error.allowed


def test_lars_constraints_and_built_optimizers_are_refused() -> None:
    import keras

    from lockstep.training.steps.optimizers import LARS

    assert refused(model_of(LARS)).got == "LARS"
    layers = [keras.Input((2,)), keras.layers.Dense(1, kernel_constraint="unit_norm", name="last")]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", jit_compile=False)
    assert "a constraint of" in refused(model).got
    built = model_of(keras.optimizers.Adam)
    built.optimizer.build(built.trainable_variables)
    assert "not built yet" in refused(built).what


def test_a_step_must_update_all_variables_and_no_rank_saves_a_part() -> None:
    import keras

    models = [[model_of(keras.optimizers.Adam) for _ in range(2)] for _ in range(2)]

    def work(comm: Communicator) -> None:
        for number, (words, wrong) in enumerate(
            [("no gradient: .*w0", lambda grads: [None, *grads[1:]]), ("for 5 variables", lambda grads: grads[1:])]
        ):
            model, group = models[number][comm.rank], comm.group(range(2))
            with exchanging(group, model, 1), pytest.raises(ConfigError, match="zero") as caught:
                grads = wrong(gradients(model, 0, comm.rank))
                model.optimizer.apply(grads, model.trainable_variables[-len(grads) :])
            assert number or "w0" in caught.value.got, words
        with pytest.raises(ConfigError, match="divided over the ranks"):
            models[0][comm.rank].optimizer.save_own_variables({})

    run_ring(2, work)
    keras.utils.clear_session()


# Whole runs: the table is in conftest.py.


def exported(run: Path) -> Any:
    import keras

    from tests.training._models import Noise

    return keras.models.load_model(next(run.rglob("model.keras")), custom_objects={"Noise": Noise})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_restart_changes_no_bit_and_none_differs_from_sync(table: str, tmp_path: Path, stage: int) -> None:
    """Killed between two checkpoints, with dropout and callbacks, one of which sets the rate; the exported models have
    equal weights and optimizers.
    """
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 7, "audit": True, "epochs": 3, "validate": "test"}
    # EarlyStopping(restore_best_weights=True) reads weights, of which no rank has all.
    model = f"{OWN}:with_callbacks" if stage < 3 else f"{OWN}:momentum_that_fails"
    whole = train(table, tmp_path / "sync", 3, model, **options)
    _models.FAIL_AT.update(step=18)
    broken = train(table, tmp_path / "zero", 3, model, zero=stage, **options)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "sync", whole), (tmp_path / "zero", broken))
    assert check_run_audit(str(tmp_path / "zero")).ok
    models = [exported(tmp_path / name) for name in ("sync", "zero")]
    for mine, other in zip(*([*one.weights, *one.optimizer.variables] for one in models), strict=True):
        assert (mine.name, mine.numpy().tobytes()) == (other.name, other.numpy().tobytes())
    assert models[0].optimizer.get_config() == models[1].optimizer.get_config()


PATH = ((0, 2), (1, 2), (3, 3), (2, 3), (0, 1), (3, 4), (1, 3), (3, 2), (0, 2))
"""(Stage, ranks) of one start after another: from each stage to each other one."""


def every_pair() -> list[tuple[int, int]]:
    """A path that goes once from each of the 16 kinds of start to each of them: de Bruijn's sequence of order 2."""
    kinds = [(stage, ranks) for stage in range(4) for ranks in range(1, 5)]
    path = [kinds[0]]
    for number, kind in enumerate(kinds):  # the Lyndon words of two letters, in order
        path += [kind] + [letter for later in kinds[number + 1 :] for letter in (kind, later)]
    return path


@pytest.mark.parametrize("path", [PATH, pytest.param(every_pair(), marks=pytest.mark.soak)], ids=["some", "all"])
def test_each_start_holds_what_another_has_saved(table: str, tmp_path: Path, compared: list[int], path: Any) -> None:
    """A rank of each start compares what it has restored with the files, bit for bit."""
    for step, (stage, ranks) in enumerate(path, 1):
        more: dict[str, Any] = {"zero": stage, "max_steps": step, "epochs": len(path), "audit": True}
        train(table, tmp_path / "run", ranks, f"{OWN}:with_averages_of_gradients", **more)
    assert len(compared) == len(path) - 1 and min(compared) > 4
