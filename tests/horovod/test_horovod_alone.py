"""lockstep.horovod in one process: what it refuses by name, learning rates, values as JSON; agreement by
threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("TF_NUM_INTEROP_THREADS", "12")  # as tests/training/_threads.py, which may share this process

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import lockstep.horovod as hvd
from lockstep.horovod import ABSENT
from lockstep.horovod.objects import decode_object, encode_object
from lockstep.horovod.runtime import agree
from lockstep.storage.errors import ConfigError, TrainingFailedError
from lockstep.training.comm import Communicator
from tests.training._ring import run_ring

pytestmark = pytest.mark.slow  # TensorFlow's import


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_without_a_launcher_there_is_one_rank() -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (0, 1, 0, 1, 1)
    assert hvd.allreduce([1.0, 2.0], op=hvd.Max).numpy().tolist() == [1.0, 2.0]
    assert not (hvd.nccl_built() or hvd.mpi_threads_supported() or hvd.gloo_enabled())
    assert hvd.allgather_object("a") == ["a"] and hvd.broadcast_object({1: None}) == {1: None}
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ConfigError, match="initialised rank"):
        hvd.size()


def test_a_process_that_a_rank_has_started_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.shutdown()
    monkeypatch.setenv("LOCKSTEP_NUM_RANKS", "2")
    with pytest.raises(ConfigError, match="not a rank, but a child of one"):
        hvd.init()


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_is_absent_says_so_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"has no `{name}`") as caught:
        getattr(hvd, name)
    assert caught.value.next_step == ABSENT[name]
    assert not hasattr(hvd, "never_heard_of")


def test_names_that_nobody_knows_say_what_was_meant() -> None:
    with pytest.raises(AttributeError, match="did you mean 'allreduce'"):
        hvd.allreduced  # type: ignore[attr-defined]  # noqa: B018 - the attribute is what is asked for
    with pytest.raises(AttributeError, match=r"docs/models\.md"):
        hvd.callbacks.NeverHeardOf  # noqa: B018 - as above
    for name in hvd.callbacks.ABSENT:
        with pytest.raises(ConfigError, match=f"has no `callbacks.{name}`"):
            getattr(hvd.callbacks, name)


class Named(NamedTuple):
    """What a script may hold its state in."""

    epoch: int
    best: int


untyped: Any = hvd  # as a script without annotations calls it
REFUSED: list[tuple[str, Any]] = [
    ("init", lambda: hvd.init([0, 1])),
    ("process_set", lambda: hvd.allreduce(1.0, process_set=object())),
    ("device_dense", lambda: untyped.grouped_allreduce([1.0], None, False)),  # meant for another argument
    ("device_sparse", lambda: untyped.allreduce(1.0, "name", True, 0.5)),  # as Keras' module orders them
    ("use_locking", lambda: untyped.DistributedOptimizer(keras.optimizers.SGD(), "name", "", "")),
    ("groups", lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups="all")),
    ("local_variables", lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1])),
    ("legacy_opts", lambda: hvd.load_model("model.keras", legacy_opts=True)),
    ("register_local_source", lambda: hvd.DistributedGradientTape(tf.GradientTape()).register_local_source(1)),
    ("Adasum", lambda: hvd.allreduce(1.0, op=hvd.Adasum)),
    ("both `op` and `average`", lambda: hvd.allreduce(1.0, True, op=hvd.Sum)),
    ("dtype that it cannot sum", lambda: hvd.allreduce(tf.constant([True]))),
    ("without numbers", lambda: hvd.broadcast(tf.constant("text"), 0)),
    ("root rank that does not exist", lambda: hvd.broadcast(1.0, 1)),
    ("splits that do not fit", lambda: hvd.alltoall([1.0, 2.0], splits=[1])),
    ("cannot be sent", lambda: hvd.broadcast_object({"model": object()})),
    ("cannot be sent", lambda: hvd.broadcast_object([Named(1, 2)])),  # would come back as an array
    ("cannot be sent", lambda: hvd.allgather_object(range(3))),
    ("IndexedSlices by Max", lambda: hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [0]), op=hvd.Max)),
    ("gradient_predivide", lambda: hvd.DistributedGradientTape(None, op=hvd.Sum, gradient_predivide_factor=2.0)),
    ("needs an optimizer of Keras 3", lambda: hvd.DistributedOptimizer(tf.keras.optimizers)),
    ("op=Min", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Min)),
    ("scale_local", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), scale_local_gradients=False)),
    ("invalid learning rate", lambda: hvd.callbacks.LearningRateWarmupCallback(0.0)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_arguments_without_a_meaning_are_refused(words: str, call: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_hints_and_the_set_of_all_ranks_change_nothing() -> None:
    everyone = hvd.global_process_set
    assert (everyone.ranks, everyone.size(), everyone.rank(), everyone.included()) == ([0], 1, 0, True)
    assert float(hvd.allreduce(2.0, device_dense="/cpu:0", device_sparse="", process_set=everyone)) == 2.0
    assert float(hvd.allreduce(2.0, "name", False)) == 2.0  # as Keras' module orders them
    variable = tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2, groups=[[variable]]) as tape:
        loss = variable * variable
    assert float(tape.gradient(loss, variable)) == 6.0
    hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=1, device_dense="/gpu:0", process_set=everyone)
    hvd.callbacks.MetricAverageCallback(device="/cpu:0")


def test_gradients_go_through_calls() -> None:
    value = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        joined = hvd.allgather(value * 2.0)
        loss = tf.reduce_sum(joined * hvd.broadcast(value, 0) * hvd.allreduce(3.0))
    np.testing.assert_allclose(tape.gradient(loss, value), 12.0 * value.numpy())
    with pytest.raises(ConfigError, match="gradient"), tf.GradientTape() as tape:
        tape.gradient(hvd.allreduce(value, op=hvd.Max), value)


def test_alltoall_alone() -> None:
    """The gradient of `received` goes back to the rank whose rows they are."""
    rows = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        received, splits = hvd.alltoall(rows, splits=[2])
        loss = tf.reduce_sum(received * received) + tf.reduce_sum(hvd.alltoall(rows))
    np.testing.assert_array_equal(received, rows)
    assert (splits.dtype, splits.numpy().tolist()) == (tf.int32, [2])
    np.testing.assert_allclose(tape.gradient(loss, rows), 2.0 * rows.numpy() + 1.0)
    assert hvd.alltoall(tf.zeros((0, 3), tf.int32)).shape == (0, 3)


def test_a_distributed_model_is_compiled_without_xla() -> None:
    """Keras decides so for itself on a machine without a GPU; a script that insists is warned."""

    def compiled(optimizer: Any) -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
        return model

    assert compiled(keras.optimizers.SGD(0.1)).jit_compile is True
    with pytest.warns(UserWarning, match="jit_compile=False"):
        model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert model.jit_compile is False
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)


@pytest.mark.parametrize("passes", [1, 2])  # whose gradients are added, also where a saved optimizer goes on
def test_a_saved_model_goes_on(passes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.125, momentum=0.5)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes), loss="mse")
    x, y = np.ones((4, 2)), np.ones(4)
    model.fit(x, y, batch_size=2, verbose=0)
    model.save(path)
    loaded = hvd.load_model(path)
    for again in (model, loaded):
        again.fit(x, y, batch_size=2, verbose=0)
    for got, wanted in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert loaded.jit_compile is False and int(loaded.optimizer.iterations) == 4 // passes
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
    with pytest.raises(ConfigError, match="without an optimizer"):
        hvd.load_model(path)


@pytest.mark.parametrize("given", [[keras.Input((2,))], []])
def test_a_model_that_is_built_has_the_weights_before_the_first_step(given: list[Any]) -> None:
    """Keras builds an optimizer in the first step: a new model's ranks would wait elsewhere than one that loaded it."""
    model = keras.Sequential([*given, keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert callback.broadcast_done == model.optimizer.built == bool(given)
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[callback])
    assert callback.broadcast_done


def rates(callback: Any, epochs: int, steps: int, optimizer: Any) -> list[float]:
    """The learning rate at each batch."""
    callback.set_model(SimpleNamespace(optimizer=optimizer))
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    found = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            callback.on_train_batch_begin(batch)
            found.append(float(optimizer.learning_rate))
            callback.on_train_batch_end(batch)
        logs: dict[str, float] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == found[-1]
    return found


def test_warm_up_reaches_the_whole_rate_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd.callbacks, "size", lambda: 4)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.8, warmup_epochs=2)
    found = rates(warm_up, 3, 2, keras.optimizers.Adam(0.8))
    # From 0.8 / 4 to 0.8 in four equal steps, of which the first has been made at the first batch.
    np.testing.assert_allclose(found, [0.35, 0.5, 0.65, 0.8, 0.8, 0.8], rtol=1e-6)


def test_schedule_by_epoch_scales_what_momentum_has_gathered() -> None:
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build([keras.Variable([1.0, 1.0])])
    optimizer.momentums[0].assign([8.0, -8.0])
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
    assert rates(schedule, 4, 2, optimizer) == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    np.testing.assert_allclose(optimizer.momentums[0], [2.0, -2.0])
    constant = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1, momentum_correction=False)
    np.testing.assert_allclose(rates(constant, 1, 1, optimizer), [0.05])
    np.testing.assert_allclose(optimizer.momentums[0], [2.0, -2.0])
    with pytest.raises(ConfigError, match="how many batches"):
        unknown = hvd.callbacks.LearningRateWarmupCallback(0.5)
        unknown.set_params({"steps": None})
        unknown.on_train_begin()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = decode_object(encode_object(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "bool", "complex128"])
def test_arrays_come_back_with_shape_and_dtype(dtype: str) -> None:
    for array in (np.ones((2, 3), dtype), np.zeros((0, 4), dtype), np.asarray(1, dtype)[()]):
        found = decode_object(encode_object(array))
        assert type(found) is type(array) and found.dtype == array.dtype and found.shape == array.shape
        np.testing.assert_array_equal(found, array)


def test_ranks_that_call_the_same_hear_of_each_other() -> None:
    assert run_ring(3, lambda comm: agree(comm, 5, "allreduce of float32[2]", 10 * comm.rank)) == [[0, 10, 20]] * 3


def test_a_rank_that_calls_something_else_is_named_on_all() -> None:
    def differ(comm: Communicator) -> str:
        with pytest.raises(TrainingFailedError, match="ranks 0 and 2 make different calls") as caught:
            agree(comm, 5, "broadcast" if comm.rank == 2 else "allreduce of float32[2]")
        return caught.value.got

    told = "rank 0: allreduce of float32[2] (call 5); rank 2: broadcast (call 5)"
    assert run_ring(4, differ) == [told] * 4


def test_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.horovod.runtime.os.getpid", lambda: -1)
    with pytest.raises(ConfigError, match="forked process"):
        hvd.barrier()
