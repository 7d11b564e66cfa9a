"""--strategy async: each gradient is applied once on every rank, ranks stay close, and they meet at the same step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.results.audit import check_run_audit
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._ring import run_ring
from tests.training._tiny import write_images
from tests.training.rank.test_fit import assert_no_bit_differs, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data") / "images"
    write_images(folder, records={"train": 400, "test": 30})
    return str(folder)


class Ranks:
    """Steps of ranks whose gradients are counted: rank r adds 1 to element r in each step."""

    def __init__(self, comm: Communicator, staleness: int, *, last: int, every: int | None = None) -> None:
        from lockstep.training.exchange.agreement import STOPS
        from lockstep.training.exchange.buckets import lay_out
        from lockstep.training.exchange.exchange import Exchange
        from lockstep.training.strategies.asynchronous import AsyncExchange, Noise

        options: dict[str, Any] = {"staleness": staleness, "every": every, "noise": Noise(0.0, 0, comm.rank)}
        self.exchange: Exchange = AsyncExchange(comm, 1.0, scaled_loss=False, non_finite=STOPS, **options)
        self.exchange.last = last
        spec = ((comm.num_ranks,), np.dtype(np.float32))
        self.exchange.use(lay_out([spec], [], 5, apart=True), ["the gradient of it"])
        self._rank, self.weights = comm.rank, np.zeros(comm.num_ranks, np.float32)

    def step(self, gradient: float = 1.0) -> None:
        """One step of SGD with rate 1."""
        mine = np.zeros_like(self.weights)
        mine[self._rank] = gradient
        self.exchange.post(0, mine)
        (found,) = self.exchange.finish(np.zeros((), np.float32))
        self.weights += found


@pytest.mark.parametrize(("staleness", "slow"), [(1, 0), (4, 1), (16, 2)])
def test_ranks_stay_close_and_every_gradient_arrives_once(staleness: int, slow: int) -> None:
    steps, ahead = 24, []

    def work(comm: Communicator) -> np.ndarray:
        ranks = Ranks(comm, staleness, last=steps)
        for step in range(1, steps + 1):
            time.sleep(0.01 if comm.rank == slow else 0.0)
            ranks.step()
            assert ranks.weights[comm.rank] == step, "its own gradient is applied at once"
            assert ranks.weights.min() >= step - staleness, "the others' are at most so many steps old"
            ahead.append(step - ranks.weights.min())
        ranks.exchange.close()
        return ranks.weights

    for weights in run_ring(3, work):
        assert weights.tolist() == [steps] * 3, "the last step waits for all"
    assert max(ahead) >= min(staleness, 4), "who is fast does not wait before"


def test_a_restart_loses_no_sample(table: str, tmp_path: Path) -> None:
    """Killed between two checkpoints; the bits depend on the clock, the audit does not."""
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 5, "audit": True, "epochs": 3, "strategy": "async", "staleness": 4,
                               "gradient_noise": 0.01}  # fmt: skip
    _models.FAIL_AT.update(step=13)
    broken = train(table, tmp_path / "broken", 2, f"{OWN}:with_callbacks", **options)
    assert not _models.FAIL_AT and broken.restarts == 1
    assert check_run_audit(str(tmp_path / "broken")).ok
    assert sorted(_threads.rows_of(str(tmp_path / "broken"), "step")) == list(range(1, 26)), "no loss is left out"


def test_a_late_rank_is_named() -> None:
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        ranks = Ranks(comm, 1, last=9)
        ranks.step()
        if comm.rank == 2:
            ended.wait(60)
            return
        try:
            for _ in range(8):
                ranks.step()
        finally:
            ended.set()

    with pytest.raises(CommunicationError, match=r"waited \d+ s for rank 2"):
        run_ring(3, work, deadline_s=2.0)


@pytest.mark.parametrize("strategy", ["async", "parameter-server"])
def test_other_numbers_of_ranks_resume(strategy: str, images: str, tmp_path: Path) -> None:
    """A model with BatchNormalization and momentum: ranks average moving averages, and have one optimizer's state."""
    more: dict[str, Any] = {"strategy": strategy, "staleness": 2, "audit": True, "checkpoint_every": 6, "lanes": 8}
    steps = 0
    for ranks, epochs in ((2, 1), (3, 2), (1, 3)):
        more["servers"] = ranks if strategy == "parameter-server" else None
        result = train(images, tmp_path, ranks, f"{OWN}:small_conv", epochs=epochs, **more)
        assert result.epochs == epochs and result.restarts == 0 and result.steps > steps
        steps = result.steps
    assert check_run_audit(str(tmp_path)).ok
    losses = {step: row["loss"] for step, row in _threads.rows_of(str(tmp_path), "step").items()}
    assert sorted(losses) == list(range(1, steps + 1))
    assert np.mean([losses[step] for step in range(steps - 5, steps)]) < 0.7 * losses[1], "it learns"
    found = _threads.final_tensors(str(tmp_path))
    assert any("moving_variance" in name and (value != 1).all() for name, value in found.items())
    assert all(value.any() for name, value in found.items() if "momentum" in name)


def test_noise_is_drawn_by_seed_rank_and_step_and_falls_with_steps() -> None:
    from lockstep.training.strategies.asynchronous import Noise

    def drawn(eta: float, seed: int, rank: int, step: int) -> np.ndarray:
        flat = np.ones(50_000, np.float32)
        Noise(eta, seed, rank).add([flat], step, 0.5)
        return flat - 1

    assert not drawn(0.0, 7, 0, 3).any()
    assert (drawn(0.3, 7, 0, 3) == drawn(0.3, 7, 0, 3)).all()
    others = [drawn(0.3, 7, 0, 3), drawn(0.3, 8, 0, 3), drawn(0.3, 7, 1, 3), drawn(0.3, 7, 0, 4)]
    assert np.abs(np.corrcoef(others) - np.eye(4)).max() < 0.03
    for step in (0, 99):
        both = drawn(0.3, 7, 0, step) + drawn(0.3, 7, 1, step)
        assert both.var() == pytest.approx(0.3 / (1 + step) ** 0.55, rel=0.03)


def test_staleness_0_is_sync(table: str, tmp_path: Path) -> None:
    sync = train(table, tmp_path / "sync", 2, f"{OWN}:with_dropout", epochs=1)
    none = train(table, tmp_path / "none", 2, f"{OWN}:with_dropout", epochs=1, strategy="async", staleness=0)
    assert_no_bit_differs((tmp_path / "sync", sync), (tmp_path / "none", none))


@pytest.mark.parametrize(
    "more",
    [
        {"canonical": True},
        {"batchnorm": "sync"},
        {"delay": 1},
        {"sync_every": 4},
        {"micro_batches": 2},
        {"non_finite": "skip"},
        {"compression": "bf16"},
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "logistic", "num_ranks": 2, "global_batch": 8, "epochs": 2}
    with pytest.raises(ConfigError):
        TrainConfig(datasets=("data",), run="run", strategy="async", staleness=4, **{**options, **more})
    with pytest.raises(ConfigError, match="`staleness`"):
        TrainConfig(datasets=("data",), run="run", strategy="async", **options)
    options["gradient_noise"] = 0.1
    with pytest.raises(ConfigError, match="`gradient_noise`"):
        TrainConfig(datasets=("data",), run="run", **options)
    with pytest.raises(ConfigError, match="`gradient_noise`"):
        TrainConfig(datasets=("data",), run="run", strategy="async", staleness=0, **options)
