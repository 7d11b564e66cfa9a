"""The contract over TensorFlow's gRPC ring, its sums against our ring's, and how it ends: ranks as real processes.

One set of three ranks serves all tests here, since a process that imports TensorFlow costs seconds; two ranks are a
group of it. What ends them comes last. NCCL is the same code with another hint, and was never run.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm import CommOptions, Communicator
from lockstep.training.comm.base import DTYPES, FLOATS
from lockstep.training.comm.tf.cluster import key_of
from lockstep.training.comm.tf.communicator import Meeting, join_servers
from lockstep.training.control.failures import RankFailedError
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.local import run_local
from tests.comm_contract import CommunicatorContract, RunRanks, values
from tests.training._ranks import judge_when, living_ranks, rank_path
from tests.training._ring import run_ring
from tests.training._tf_ranks import Ranks

slow = pytest.mark.slow
WHOLE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks(WHOLE)
    yield found
    found.close()


@slow
@pytest.mark.parametrize("num_ranks", [2, 3])
class TestTensorflow(CommunicatorContract):
    sizes: ClassVar[tuple[int, ...]] = (0, 1, 997)
    large: ClassVar[int] = 20_003
    test_after_close_and_abort = None  # type: ignore[assignment] # below: it ends the processes
    test_all_to_all_of_different_dtypes = None  # type: ignore[assignment] # likewise

    @pytest.fixture
    def run_ranks(self, ranks: Ranks) -> RunRanks:
        return ranks.run


@slow
def test_our_ring_agrees_with_tensorflows(ranks: Ranks) -> None:
    """The same numbers through both: equal but for the order of the sums."""

    def work(comm: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        results = []
        for dtype in DTYPES:
            theirs, ours = (values(comm.rank, 30_011, dtype) for _ in range(2))
            comm.all_reduce(theirs)
            comm.ordinary.all_reduce(ours)
            results.append((theirs, ours))
        return results

    for theirs, ours in ranks.run(WHOLE, work)[1]:
        if ours.dtype not in FLOATS:
            np.testing.assert_array_equal(theirs, ours)
            continue
        largest = np.abs(np.array([values(rank, ours.size, ours.dtype) for rank in range(WHOLE)], np.float64)).sum(0)
        eps = 2.0**-7 if ours.dtype.itemsize == 2 else np.finfo(ours.dtype).eps
        assert np.all(np.abs(theirs.astype(np.float64) - ours.astype(np.float64)) <= WHOLE * eps * largest), ours.dtype


@slow
def test_minima_and_maxima_that_are_gathered_keep_a_nan(ranks: Ranks) -> None:
    """As with nccl."""

    def run(num_ranks: int, work: Any) -> list[Any]:
        def forced(comm: Any) -> Any:
            comm.gathers_extremes = True
            try:
                return work(comm)
            finally:
                comm.gathers_extremes = False

        ran.append(ranks.run(num_ranks, forced))
        return list(ran[-1])

    ran: list[list[Any]] = []
    CommunicatorContract().test_numbers_that_are_none(run, 2)  # which holds each rank's results against NumPy's
    assert ran and all(len(results) == 2 for results in ran)


def three_steps(comm: Communicator, poison: bool = False) -> tuple[list[np.ndarray], Any]:
    """Weights and exchange after three steps of `fit`; the last batch of rank 0 is smaller, which it traces anew."""
    import keras

    from lockstep.training.steps.batchnorm import statistics_of
    from lockstep.training.steps.distribute import distribute, exchange_of

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((40,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal((12 if comm.rank else 10, 40)).astype(np.float32)
    y = x[:, :1] * 2
    if poison and comm.rank == 1:
        y[9] = np.inf
    share = [0.25, 0.75][comm.rank]
    distribute(model.optimizer, comm, share, statistics=statistics_of(model), bucket_bytes=1 << 10)
    exchange = exchange_of(model.optimizer)
    try:
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    except Exception:
        if exchange.error is None:
            raise
    exchange.close()
    return model.get_weights(), exchange


@slow
def test_steps_in_the_graph_are_those_of_our_exchange(ranks: Ranks) -> None:
    """Gradients that never leave the device, hint ring in place of nccl, against buckets through the host's memory."""

    def work(comm: Any) -> tuple[list[np.ndarray], list[np.ndarray], list[Any]]:
        from lockstep.training.exchange.exchange import Exchange

        with pytest.MonkeyPatch.context() as patch:
            mine, exchange = three_steps(comm.ordinary)
            patch.delattr(Exchange, "post")  # what hands a gradient to the host
            theirs, in_graph = three_steps(comm)
        assert (exchange.step, in_graph.step) == (3, 3)
        assert type(in_graph).__name__ == "GraphExchange"
        return mine, theirs, [exchange.agreement, in_graph.agreement]

    (ours, in_graph, agreements), (_, other, others) = ranks.run(2, work)
    assert all(np.array_equal(one, two) for one, two in zip(in_graph, other, strict=True)), "ranks differ in a bit"
    for one, two in zip(ours, in_graph, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert agreements[1] == others[1]
    assert agreements[0].loss == pytest.approx(agreements[1].loss, rel=1e-6)


@slow
def test_a_gradient_in_the_graph_that_is_not_finite(ranks: Ranks) -> None:
    """Both ranks stop at the third step and name the same gradient; the communicator stays whole."""

    def work(comm: Any) -> str:
        _, exchange = three_steps(comm, poison=True)
        comm.barrier()
        return f"{type(exchange.error).__name__}: {exchange.error.what}"

    first, second = ranks.run(2, work)
    assert first == second
    assert first.startswith("NonFiniteError: step 3: the loss is not finite")


@slow
def test_a_second_server_is_refused(ranks: Ranks) -> None:
    def work(comm: Any) -> str:
        options = CommOptions(backend="tensorflow", trust_network="lo")
        with pytest.raises(ConfigError, match="requested too late") as caught:
            join_servers(comm.rank, comm.num_ranks, lambda *_: [], comm.ordinary, options)
        return caught.value.next_step

    assert all("context.communicator() first" in step for step in ranks.run(WHOLE, work))


@slow
@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ([None, None, None], "TensorFlow sees no GPU on rank 0"),
        (["GPU-1", "GPU-2", None], "TensorFlow sees no GPU on rank 2"),
        (["GPU-1", "GPU-2", "GPU-1"], "ranks 0 and 2 share the GPU GPU-1"),
        (["GPU-1", "GPU-2", "GPU-3"], ""),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(ranks: Ranks, gpus: list[str | None], told: str) -> None:
    """Told on every rank alike."""

    def work(comm: Any) -> str:
        import tensorflow as tf

        from lockstep.training import devices
        from lockstep.training.comm.tf.cluster import _check_gpus

        mine = gpus[comm.rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tf.config, "list_physical_devices", lambda kind: [kind] if mine else [])
            patch.setattr(devices, "identity", lambda *_: mine)
            try:
                _check_gpus(comm.ordinary)
            except ConfigError as error:
                assert error.what == "the nccl backend cannot serve these ranks"
                return error.got
        return ""

    assert ranks.run(WHOLE, work) == [told] * WHOLE


@slow
def test_a_closed_group_is_released(ranks: Ranks) -> None:
    def work(comm: Any) -> list[bool]:
        group, alone = comm.group(range(comm.num_ranks)), comm.group([comm.rank])
        held = [weakref.ref(one) for one in (group, group.ordinary, alone)]
        for one in (group, alone):
            one.close()
            with pytest.raises(CommunicationError, match="has ended: it was closed"):
                one.barrier()
        comm.group([comm.rank])  # which looks for ended ones
        comm.group(range(comm.num_ranks)).barrier()
        del group, alone, one
        gc.collect()
        return [ref() is None for ref in held]

    assert ranks.run(WHOLE, work) == [[True] * 3] * WHOLE


@slow
def test_an_interrupt_in_tensorflows_call_ends_the_others_calls(ranks: Ranks) -> None:
    """Rank 0 is interrupted while it waits within TensorFlow, rank 1 waits there too, rank 2 has just met them."""

    def work(comm: Any) -> str:
        from lockstep.training.steps.reduction import GraphExchange

        if comm.rank == 2:
            meet = comm._meeting.all

            def then_linger(*call: Any) -> None:
                meet(*call)
                assert comm.cluster._over.wait(240), "nobody has told this rank"

            comm._meeting.all = then_linger
        if comm.rank == 0:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt("the test says so")

            meet = comm._meeting.all

            def then_wait(*call: Any) -> None:
                meet(*call)
                signal.setitimer(signal.ITIMER_REAL, 1.0)

            signal.signal(signal.SIGALRM, interrupt)
            comm._meeting.all = then_wait
        began = time.monotonic()
        with pytest.raises((KeyboardInterrupt, CommunicationError)) as caught:
            comm.all_reduce(np.ones(1000, np.float32))
        assert time.monotonic() - began < comm.deadline_s / 2
        fault = GraphExchange(comm).fault()  # of a step whose sums TensorFlow has ended, which names nobody
        said = f"{'rank 0: ' if comm.rank else ''}KeyboardInterrupt: the test says so"
        assert isinstance(fault, CommunicationError)
        assert fault.what.endswith(f"step 1: the sums of gradients were ended: {said}")
        return f"{caught.type.__name__}: {caught.value}".splitlines()[0]

    first, *others = ranks.run(WHOLE, work)
    assert first == "KeyboardInterrupt: the test says so"
    for rank, told in enumerate(others, start=1):
        assert told == (
            f"CommunicationError: rank {rank}: all_reduce sum of float32, 1000 elements was ended: "
            "rank 0: KeyboardInterrupt: the test says so"
        )


@slow
def test_abort_and_close_end_it(ranks: Ranks) -> None:
    """The last of the three ranks' tests; for the same reason as the one before it."""
    CommunicatorContract().test_after_close_and_abort(ranks.run, WHOLE)

    def work(comm: Any) -> str:
        with pytest.raises(CommunicationError, match="the test says so") as caught:
            comm.group([0, 1, 2])
        return caught.value.next_step

    assert all("do not recover within a process" in step for step in ranks.run(WHOLE, work))


@slow
def test_a_rank_killed_in_the_middle_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's part of the call has begun; the rank that is left is told whom it lost, and no retry helps it."""
    rank_path(monkeypatch)
    told = tmp_path / "rank-0"
    judge_when(monkeypatch, lambda state: told.exists() and told.read_text())  # or it is ended before it tells
    options = CommOptions(backend="tensorflow", trust_network="lo").to_json()
    payload = {"folder": str(tmp_path), "comm": {"options": options}}
    with pytest.raises(RankFailedError, match="SIGKILL") as caught:
        run_local(RankTask("_tf_entries:killed_in_a_call", payload), 2, limits=Limits(grace_s=1.0))
    assert caught.value.rank == 1
    first, second = told.read_text().split("\n---\n")
    assert first.startswith("rank 0: all_reduce sum of float32, 1000000 elements was ended: lost rank 1 during a call")
    assert "the communicator has ended" in second and "do not recover within a process" in second
    assert living_ranks(os.getpid()) == []  # the rank that is left ignored SIGTERM: the supervisor has its way


def test_ranks_that_differ_are_told_before_tensorflow_is_asked() -> None:
    def work(comm: Communicator) -> str:
        meeting = Meeting(comm)
        meeting.all("all_reduce sum of float32", 5, 1)
        with pytest.raises(CommunicationError) as caught:
            meeting.all("all_reduce sum of float32", 6 if comm.rank == 1 else 5, 2)
        return str(caught.value)

    first, second = run_ring(2, work)
    assert "rank 0: rank 1 makes another call than all_reduce sum of float32" in first
    assert "got: call 2, of 6 elements" in first
    assert "rank 1: rank 0 makes another call" in second


def test_two_that_differ_are_told() -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == 2:
            return ""
        with pytest.raises(CommunicationError) as caught:
            Meeting(comm).two(0, 1, ["send of int32", "send of int64"][comm.rank], 3, 1)
        return caught.value.what

    assert run_ring(3, work)[:2] == [
        "rank 0: rank 1 makes another call than send of int32",
        "rank 1: rank 0 makes another call than send of int64",
    ]


@pytest.mark.parametrize("backend", ["tensorflow", "nccl"])
def test_no_network_is_trusted_by_itself(backend: Any) -> None:
    with pytest.raises(ConfigError, match=f"the {backend} backend does not authenticate its peers") as caught:
        CommOptions(backend=backend)
    assert "--trust-network IFACE" in caught.value.next_step


def test_group_keys() -> None:
    keys = {key_of(7, "group", *ranks, made) for ranks in ((0, 1), (1, 0), (0, 2), (0, 1, 2)) for made in (1, 2)}
    assert len(keys) == 8
    assert all(0 < key < 2**31 for key in keys)
    assert key_of(7, "group", 0, 1, 1) == 318923157  # the same in every process and version of Python
