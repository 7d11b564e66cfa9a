"""Ranks that are about to sum other things than their peers, and a rank whose step fails: told by name, no hang."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.exchange.agreement import CONTROL_WORDS
from lockstep.training.exchange.buckets import Spec, lay_out
from lockstep.training.exchange.compare_ranks import compare_runs, compare_tensors, counted_from_0, versions
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.exchange.sparse import Table
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._own_steps import Learner, batches
from tests.training._ring import run_ring

F4 = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"names": ["a", "c"]}, r"on rank 1: c \(3,\) float32"),  # another layer is frozen
        ({"names": ["b", "a"]}, r"on rank 1: b .*, a .*\(2 in all\)"),  # the same in another order
        ({"names": ["a"]}, r"nothing that the other one lacks \(1 in all\)"),  # None on this rank
        ({"shape": (4,)}, r"on rank 1: a \(4,\)"),
        ({"dtype": np.dtype(np.float64)}, "float64"),
        ({"tables": [Table("t", (9, 2), F4)]}, r"t \(9, 2\)"),
        ({"bucket_bytes": 64}, "in bucket 0"),  # another option of distribute
    ],
)
def test_other_gradients_on_one_rank_are_refused_on_all(second: dict[str, Any], words: str) -> None:
    def work(comm: Communicator) -> str:
        mine: dict[str, Any] = {"names": ["a", "b"], "shape": (3,), "dtype": F4, "tables": [], "bucket_bytes": 1 << 20}
        if comm.rank == 1:
            mine |= second
        specs: list[Spec] = [(mine["shape"], mine["dtype"]) for _ in mine["names"]]
        exchange = Exchange(comm)
        layout = lay_out(specs, [], CONTROL_WORDS, mine["bucket_bytes"])
        with pytest.raises(ConfigError, match=words) as caught:
            exchange.use(layout, mine["names"], mine["tables"])
        exchange.close()
        comm.barrier()  # the communicator is whole
        return str(caught.value)

    errors = run_ring(2, work)
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1 has gradients for other tensors than rank 0")


def test_layers_that_keras_numbers_otherwise_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 has built another model before."""
    first = ["the gradient of dense/kernel", "the gradient of dense_1/kernel", "the gradient of scale"]

    def work(comm: Communicator) -> None:
        compare_tensors(comm, first)
        assert "have other numbers" not in caplog.text
        comm.barrier()
        compare_tensors(
            comm, [name.replace("dense", "dense_3").replace("_3_1", "_4") for name in first] if comm.rank else first
        )

    run_ring(2, work)
    assert "have other numbers" in caplog.text
    names = ["conv2d_9/kernel", "a_3", "b/conv2d_11/bias"]
    assert counted_from_0(names) == ["conv2d_0/kernel", "a_3", "b_0/conv2d_2/bias"]
    of_three = [["dense/kernel", "dense_1/kernel"], ["dense/kernel", "dense_2/kernel"]]  # the third, the second frozen
    assert counted_from_0(of_three[0]) != counted_from_0(of_three[1])


def test_another_version_or_other_weights_on_one_rank_are_told_on_all() -> None:
    def work(comm: Communicator) -> str:
        compare_runs(comm, {**versions(), "step": 3})
        with pytest.raises(ConfigError) as caught:
            compare_runs(comm, {**versions(), "weights": f"digest {comm.rank // 2}"})
        return str(caught.value)

    errors = run_ring(3, work)
    assert errors[0].startswith("rank 2 differs from rank 0 in `weights`")
    assert len(set(errors)) == 1 and "digest 1" in errors[0]


@pytest.mark.slow
def test_a_step_that_fails_on_one_rank_ends_it_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the hook itself: nobody else would end the communicator before the deadline."""
    import keras

    from lockstep.training.steps.distribute import distribute, exchange_of

    comms = _threads._join(2, 1)
    learners = [Learner(keras.optimizers.SGD(0.1), eager=True) for _ in comms]
    for learner, comm in zip(learners, comms, strict=True):
        learner.optimizer = distribute(learner.optimizer, comm, bucket_bytes=64)

    def one(rank: int) -> BaseException:
        data = batches(3)
        exchange = exchange_of(learners[rank].optimizer)
        learners[rank].run(data[:1])
        if rank == 1:

            def no_memory(*_: Any) -> Any:
                raise MemoryError("no room for a bucket")

            monkeypatch.setattr(exchange, "_free_buffer", no_memory)
        with pytest.raises(Exception, match=r"no room for a bucket"):
            learners[rank].run(data[1:])
        assert exchange.error is not None
        comms[rank].close()
        return exchange.error

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(one, range(2)))
    assert time.monotonic() - began < 300, "far below the communicator's deadline of 600 s"
    assert isinstance(errors[0], CommunicationError)
    assert isinstance(errors[1], MemoryError)


@pytest.mark.slow
def test_gradients_under_a_condition_are_refused() -> None:
    """As under a LossScaleOptimizer that judges one rank's gradients: the others would wait."""
    import keras
    import tensorflow as tf

    from lockstep.training.comm import SoloCommunicator
    from lockstep.training.steps.distribute import distribute

    learner = Learner(distribute(keras.optimizers.SGD(0.1), SoloCommunicator()))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        return tf.cond(tf.reduce_all(tf.math.is_finite(x)), lambda: learner._step(x, y), lambda: y[0, 0])

    with pytest.raises(ConfigError, match="under a condition"):
        step(*(tf.constant(part) for part in batches(1)[0]))

    compiled = tf.function(learner._step, autograph=False, jit_compile=True)
    with pytest.raises(ConfigError, match="compiled by XLA"):
        compiled(*(tf.constant(part) for part in batches(1)[0]))


@pytest.mark.slow
def test_a_plain_optimizer_has_no_exchange_and_says_so() -> None:
    import keras

    from lockstep.training.steps.distribute import exchange_of

    with pytest.raises(ConfigError, match="SGD"):
        exchange_of(keras.optimizers.SGD())
