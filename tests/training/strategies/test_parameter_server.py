"""--strategy parameter-server: what servers apply, when ranks wait and meet, and what survives the end of a server."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.driver.train import train as drive
from lockstep.training.launch.local import run_local
from lockstep.training.results.audit import check_run_audit
from lockstep.training.strategies.server_process import Push, Rule, Server
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._ranks import living_ranks
from tests.training._ring import run_ring
from tests.training.rank.test_fit import assert_no_bit_differs, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
SIZE = 5  # of two buckets each: no multiple of the number of servers


class Rank:
    """A rank's side without a model: SGD with rate 1 from weights 0."""

    def __init__(self, whole: Communicator, ranks: int, staleness: int, *, last: int, every: int | None = None) -> None:
        from lockstep.training.exchange.agreement import STOPS
        from lockstep.training.exchange.buckets import lay_out
        from lockstep.training.strategies.parameter_server import ServedExchange

        comm, options = whole.group(range(ranks)), {"staleness": staleness, "every": every}
        self.exchange = ServedExchange(comm, 1 / ranks, whole=whole, scaled_loss=False, non_finite=STOPS, **options)
        self.exchange.last, self.exchange.rate, self.exchange.variables = last, 1.0, ["a", "b"]
        self.exchange.begins = [[np.zeros(SIZE, np.float32)] for _ in range(2)]
        spec = ((SIZE,), np.dtype(np.float32))
        self.exchange.use(lay_out([spec, spec], [], 5, bucket_bytes=SIZE * 4, apart=True), ["a", "b"])

    def step(self) -> float:
        """Each rank's gradient is minus the number of ranks, so a push adds 1; returns a weight."""
        ranks = self.exchange.communicator.num_ranks
        for bucket in range(2):
            self.exchange.post(bucket, np.full(SIZE, -ranks, np.float32))
        self.exchange.finish(np.zeros((), np.float32))
        flats = [flat[:SIZE] for flat in self.exchange.weights]
        if self.exchange.met:  # else each server may be at another point
            assert len({float(value) for flat in flats for value in flat}) == 1, "all parts have all gradients"
        return float(flats[0][0])


def serve(
    ranks: int, servers: int, staleness: int, work: Any, *, deadline_s: float = 120.0, server: type[Server] = Server
) -> list[Any]:
    """Results of `work(whole)` on each rank, then of each server."""

    def one(whole: Communicator) -> Any:
        if whole.rank < ranks:
            return work(whole)
        return server(whole, ranks, staleness, lambda step, phase: None).run()

    return run_ring(ranks + servers, one, deadline_s=deadline_s)


@pytest.mark.parametrize(("ranks", "servers", "staleness"), [(1, 2, 1), (2, 1, 4), (3, 2, 2)])
def test_every_gradient_is_applied_once_and_ranks_stay_close(ranks: int, servers: int, staleness: int) -> None:
    steps, done = 12, np.zeros(ranks, np.int64)

    def work(whole: Communicator) -> list[float]:
        rank, found = Rank(whole, ranks, staleness, last=steps, every=6), []
        for step in range(1, steps + 1):
            time.sleep(0.01 if whole.rank == 1 else 0.0)
            done[whole.rank] = step
            weight = rank.step()
            assert done.min() >= step - staleness
            if rank.exchange.met:
                found.append(weight)
        rank.exchange.end()
        rank.exchange.close()
        return found

    *found, _ = results = serve(ranks, servers, staleness, work)
    assert all(result == {"steps": steps, "updates": steps * ranks} for result in results[ranks:])
    assert found[0] == results[ranks - 1], "equal on all ranks after each meeting, of steps 6 and 12"
    assert len(found[0]) == 2 and 0 < found[0][1] <= steps * ranks


def test_a_rank_answered_late_at_a_meeting_gets_no_gradient_that_others_pushed_since() -> None:
    class LateForRankZero(Server):
        def _wait(self, rank: int, push: Push) -> None:
            super()._wait(rank, push)
            if rank == 0 and push.step == 2:
                assert self._changed.wait_for(lambda: self._counts.max() > push.step, 60)

    def work(whole: Communicator) -> list[float]:
        rank = Rank(whole, 2, 4, last=4, every=2)
        weights = [rank.step() for _ in range(4)]
        rank.exchange.end()
        rank.exchange.close()
        return [weights[1], weights[3]]

    first, second, _ = serve(2, 1, 4, work, server=LateForRankZero)
    assert first == second


def test_servers_end_without_an_error_when_ranks_leave_before_their_last_step() -> None:
    def work(whole: Communicator) -> None:
        rank = Rank(whole, 2, 1, last=9, every=2)
        for _ in range(2):
            rank.step()
        rank.exchange.close()  # as `Fit` does

    assert serve(2, 1, 1, work)[2] == {"steps": 2, "updates": 4}


def test_servers_end_without_an_error_when_there_is_no_step_left() -> None:
    """As of a run whose driver was killed between the last checkpoint and the result."""

    def work(whole: Communicator) -> None:
        exchange = Rank(whole, 2, 1, last=9).exchange
        exchange.resume(9)
        exchange.end()
        exchange.close()

    assert serve(2, 2, 1, work)[2:] == [{"steps": 9, "updates": 18}] * 2


def test_an_old_gradient_is_applied_at_a_lower_rate() -> None:
    """Rank 1 takes two steps while rank 0 computes its first: that gradient is two steps old."""
    turn, second_done = [threading.Event(), threading.Event()], threading.Event()

    def work(whole: Communicator) -> list[float]:
        rank = Rank(whole, 2, 4, last=3)
        if whole.rank == 1:
            turn[0].wait(60)  # rank 0's weights begin the server
        weights = []
        for step in range(1, 3):
            if whole.rank == 0 and step == 2:
                turn[0].set()
                turn[1].wait(60)
            weights.append(rank.step())
        if whole.rank == 0:
            second_done.set()
        else:
            turn[1].set()
            second_done.wait(60)
        weights.append(rank.step())
        rank.exchange.end()
        rank.exchange.close()
        return weights

    first, second, _ = serve(2, 1, 4, work)
    assert second[:2] == [2.0, 3.0], "rank 0's first gradient, and its own two"
    assert first[1] == 3.5, "its second one, whose weights have missed two steps of rank 1, by half"
    assert first[2] == second[2]


def test_ranks_meet_soon_after_one_asks() -> None:
    def work(whole: Communicator) -> list[int]:
        rank, met = Rank(whole, 3, 2, last=20), []
        for step in range(1, 21):
            if step == 4 and whole.rank == 1:
                rank.exchange.want("checkpoint")
            rank.step()
            if rank.exchange.met:
                met.append(step)
                assert rank.exchange.agree(equal=True).checkpoint is (step < 20)
        rank.exchange.end()
        rank.exchange.close()
        return met

    first, *others, _, _ = serve(3, 2, 2, work)
    assert first[-1] == 20 and len(first) == 2 and 5 <= first[0] <= 4 + 2 + 2 and others == [first, first]


def test_a_late_rank_and_a_lost_server_are_named() -> None:
    ended = threading.Event()

    def work(whole: Communicator) -> None:
        rank = Rank(whole, 2, 1, last=9)
        rank.step()
        if whole.rank == 1:
            ended.wait(60)
            return
        try:
            for _ in range(8):
                rank.step()
        finally:
            ended.set()

    with pytest.raises(CommunicationError, match="rank 1 is late: rank 0 waits at server 0 after step 3"):
        serve(2, 1, 1, work, deadline_s=2.0)

    def lone(whole: Communicator) -> None:
        if whole.rank == 2:
            Server(whole, 1, 1, lambda step, phase: None).run()
        elif whole.rank == 0:
            rank = Rank(whole, 1, 1, last=9)
            rank.step()

    with pytest.raises(CommunicationError, match="rank 0, step 1, waits for server 0"):
        run_ring(3, lone, deadline_s=5.0)


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "SGD with Nesterov momentum", "Adam"])
def test_servers_compute_what_keras_does(name: str) -> None:
    import keras

    from lockstep.training.strategies.parameter_server import rule_of

    momentum = 0.875 if "momentum" in name else 0.0
    optimizer = keras.optimizers.SGD(0.1, momentum=momentum, nesterov="Nesterov" in name)
    if name == "Adam":
        optimizer = keras.optimizers.Adam(0.1, beta_1=0.8)
    variable, rng = keras.Variable(np.zeros(7, np.float32)), np.random.default_rng(3)
    rule, weights = rule_of(optimizer), np.zeros(7, np.float32)
    slots = [np.zeros(7, np.float32) for _ in range(rule.slots)]
    for update in range(1, 6):
        gradient = rng.normal(size=7).astype(np.float32)
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        rule.apply(weights, slots, gradient, 0.1, update)
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, np.array(variable.numpy()), rtol=1e-5, atol=1e-6)


def test_a_server_that_ends_and_a_rank_that_ends_lose_no_sample(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 1 fails when rank 2 pushes step 8, a rank at step 13; ranks have dropout and callbacks, and Adam."""
    from tests.training import _models  # imports TensorFlow

    apply, failed = Server._apply, list[int]()

    def fails_once(server: Server, rank: int, push: Push, gradients: Any) -> None:
        if (rank, push.step, server._name) == (2, 8, "server 1") and not failed:
            failed.append(push.step)
            raise RuntimeError("told to fail")
        apply(server, rank, push, gradients)

    monkeypatch.setattr(Server, "_apply", fails_once)
    _models.FAIL_AT.update(step=13)
    options: dict[str, Any] = {"strategy": "parameter-server", "servers": 2, "staleness": 4, "audit": True}
    broken = train(table, tmp_path, 3, f"{OWN}:with_callbacks", epochs=3, checkpoint_every=5, **options)
    assert failed and not _models.FAIL_AT and broken.restarts == 2
    assert check_run_audit(str(tmp_path)).ok
    losses = _threads.rows_of(str(tmp_path), "step")
    assert sorted(losses) == list(range(1, 26)), "no loss is left out"


def test_staleness_0_is_sync(table: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "parameter-server", "servers": 2}
    sync = train(table, tmp_path / "sync", 2, f"{OWN}:with_dropout", epochs=1)
    none = train(table, tmp_path / "none", 2, f"{OWN}:with_dropout", epochs=1, staleness=0, **options)
    assert_no_bit_differs((tmp_path / "sync", sync), (tmp_path / "none", none))
    alone = TrainConfig(
        datasets=("d",), run="r", model="m", num_ranks=1, global_batch=8, epochs=1, staleness=4, **options
    )
    assert alone.processes == 1, "so is one rank"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"canonical": True}, "strategy"),
        ({"batchnorm": "sync"}, "strategy"),
        ({"delay": 1}, "delay"),
        ({"sync_every": 4}, "sync_every"),
        ({"micro_batches": 2}, "strategy"),
        ({"non_finite": "skip"}, "strategy"),
        ({"compression": "bf16"}, "strategy"),
        ({"backend": "shm"}, "backend"),
        ({"servers": None}, "servers"),
        ({"servers": 0}, "servers"),
        ({"staleness": None}, "staleness"),
        ({"gradient_noise": 0.1}, "gradient_noise"),
        ({"strategy": "async"}, "servers"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"model": "logistic", "num_ranks": 2, "global_batch": 8, "epochs": 2, "staleness": 4,
                               "strategy": "parameter-server", "servers": 2}  # fmt: skip
    with pytest.raises(ConfigError, match=f"`{named}`"):
        TrainConfig(datasets=("data",), run="run", **(options | more))


def test_optimizers_that_servers_lack_are_refused() -> None:
    import keras

    from lockstep.training.strategies.parameter_server import rule_of

    for optimizer in (keras.optimizers.AdamW(), keras.optimizers.RMSprop(), keras.optimizers.SGD(clipnorm=1.0)):
        with pytest.raises(ConfigError, match="parameter servers cannot apply"):
            rule_of(optimizer)
    assert rule_of(keras.optimizers.SGD()) == Rule("sgd")


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["server", "rank"])
def test_a_killed_process_is_started_again(victim: str, table: str, tmp_path: Path) -> None:
    """Real processes: SIGKILL for a server (which uses no TensorFlow) or a rank, once there is a checkpoint."""
    import psutil

    run = tmp_path / "run"
    killed: list[int] = []

    def kill() -> None:
        while not list(run.glob("checkpoints/step-*")):
            time.sleep(0.02)
        found = [psutil.Process(pid) for pid in living_ranks(os.getpid())]
        found.sort(key=lambda one: one.memory_full_info().uss)
        assert len(found) == 3 and found[0].memory_full_info().uss < found[1].memory_full_info().uss / 2
        target = found[0] if victim == "server" else found[-1]
        killed.append(target.pid)
        target.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    config = TrainConfig(
        datasets=(table,), run=str(run), model="mlp", num_ranks=2, global_batch=8, epochs=12, checkpoint_every=10,
        launcher="local", strategy="parameter-server", servers=1, staleness=2, audit=True,
    )  # fmt: skip
    result = drive(config, run_local, hooks=Hooks(lease_watch_s=0.1))
    thread.join()
    assert killed and result.restarts == 1 and check_run_audit(str(run)).ok
