"""--sync-every: ranks train by themselves and meet; what they average, when, and through restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.comm import Communicator
from lockstep.training.config import TrainConfig
from lockstep.training.results.audit import check_run_audit
from tests.training import _threads  # sets TensorFlow's threads before it makes them
from tests.training._ring import run_ring
from tests.training._tiny import write_clicks
from tests.training.rank.test_fit import assert_no_bit_differs, train

pytestmark = pytest.mark.slow
OWN = "tests.training._models"
SHARES = (0.25, 0.75)


def on_two_ranks(gradients: Any, *, steps: int, inner: float = 0.0, **options: Any) -> list[Any]:
    """Each rank's weights and slots after steps of SGD with rate 1 and these gradients (step, rank) from weights 0."""
    import keras

    from lockstep.training.steps.distribute import distribute, exchange_of
    from lockstep.training.strategies.local_steps import LocalExchange, LocalSteps

    models = []
    for _ in range(2):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0, momentum=inner), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        models.append(model)

    def work(comm: Communicator) -> Any:
        model, rank = models[comm.rank], comm.rank
        distribute(model.optimizer, comm, SHARES[rank], make_exchange=LocalExchange)
        exchange = exchange_of(model.optimizer)
        assert isinstance(exchange, LocalExchange)
        strategy = LocalSteps(model, exchange, **options)
        strategy.begin_epoch(0, steps)
        agreed = []
        for step in range(1, steps + 1):
            model.optimizer.scale_loss(keras.ops.convert_to_tensor(float(10 * step + rank)))
            gradient = np.full((2, 1), gradients(step, rank), np.float32)
            model.optimizer.apply([keras.ops.convert_to_tensor(gradient)], model.trainable_variables)
            assert exchange.agreement is not None
            if step == 2 and rank == 1:
                exchange.want("stop")
            found = strategy.step_ends(exchange.agreement, epoch_ends=step == steps)
            agreed.append((found.agreed, found.equal, found.stop, found.losses))
        strategy.end()
        slots = [float(v.numpy().flat[0]) for v in model.optimizer.variables[2:]]
        return float(model.get_weights()[0][0, 0]), slots, agreed, strategy.state(), model.optimizer.iterations.numpy()

    return run_ring(2, work)


def mean(step: int) -> float:
    """Of the gradients `step + rank`, by the ranks' shares."""
    return step + SHARES[1]


def test_ranks_average_what_they_did_apart_and_agree_only_then() -> None:
    for weight, _, agreed, state, count in on_two_ranks(lambda step, rank: step + rank, steps=5, every=2):
        assert weight == pytest.approx(-sum(map(mean, range(1, 6)))) and count == 5 and state == {}
        assert [each[:3] for each in agreed] == [
            (False, False, False),
            (True, True, True),  # wanted by rank 1
            (False, False, False),
            (True, True, False),
            (True, True, False),  # the end of the epoch
        ]
        losses = [10 * step + SHARES[1] for step in range(1, 6)]
        assert [loss for each in agreed for loss in each[3]] == pytest.approx(losses)


def test_the_optimizers_state_is_averaged_with_the_weights() -> None:
    velocity = weight = 0.0
    for step in range(1, 4):
        velocity = 0.5 * velocity - mean(step)
        weight += velocity
    for found, slots, *_ in on_two_ranks(lambda step, rank: step + rank, steps=3, inner=0.5, every=3):
        assert found == pytest.approx(weight) and slots == pytest.approx([velocity])


def test_an_outer_step_has_nesterov_momentum() -> None:
    rate, momentum, weight, velocity = 0.7, 0.9, 0.0, 0.0
    for first in (1, 3):
        change = mean(first) + mean(first + 1)  # the last weights less the average
        velocity = momentum * velocity + change
        weight -= rate * (change + momentum * velocity)
    options: dict[str, Any] = {"every": 2, "learning_rate": rate, "momentum": momentum}
    for found, _, _, state, _ in on_two_ranks(lambda step, rank: step + rank, steps=4, **options):
        assert found == pytest.approx(weight, rel=1e-6)
        ((name, value),) = state.items()
        assert name.startswith("outer/000000/") and value == pytest.approx(np.full((2, 1), velocity))


def test_0_averages_once_at_the_end() -> None:
    for weight, _, agreed, *_ in on_two_ranks(lambda step, rank: step + rank, steps=4, every=0):
        assert weight == pytest.approx(-sum(map(mean, range(1, 5))))
        assert [each[:2] for each in agreed] == [(False, False)] * 3 + [(True, False)]  # losses, not weights


def test_a_gradient_that_is_not_finite_is_named_with_rank_and_step() -> None:
    with pytest.raises(LockstepError, match=r"step 3: the gradient of .* is not finite on rank 1"):
        on_two_ranks(lambda step, rank: np.inf if (step, rank) == (3, 1) else 1.0, steps=4, every=4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"canonical": True}, "sync_every"),
        ({"batchnorm": "sync"}, "sync_every"),
        ({"delay": 1}, "sync_every"),
        ({"micro_batches": 2}, "sync_every"),
        ({"non_finite": "skip"}, "sync_every"),
        ({"max_steps": 6}, "max_steps"),
        ({"sync_every": 0, "validate": "test"}, "sync_every"),
        ({"sync_every": 0, "outer_momentum": 0.9}, "outer_momentum"),
        ({"sync_every": 1, "outer_learning_rate": 0.7}, "outer_learning_rate"),
        ({"sync_every": 1, "sync_until_epoch": 1}, "sync_until_epoch"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"model": "logistic", "num_ranks": 2, "global_batch": 8, "epochs": 2, "sync_every": 4}
    with pytest.raises(ConfigError, match=f"`{named}`"):
        TrainConfig(datasets=("data",), run="run", **{**options, **more})


def test_a_restart_changes_no_bit(table: str, tmp_path: Path) -> None:
    """8 or 9 steps an epoch, meetings every 5 and at the ends of epochs; killed between two, with dropout."""
    from tests.training import _models  # imports TensorFlow

    options: dict[str, Any] = {"checkpoint_every": 4, "audit": True, "epochs": 3, "sync_every": 5, "validate": "test"}
    options |= {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    whole = train(table, tmp_path / "whole", 2, f"{OWN}:with_callbacks", **options)
    _models.FAIL_AT.update(step=13)
    broken = train(table, tmp_path / "broken", 2, f"{OWN}:with_callbacks", **options)
    assert not _models.FAIL_AT and (whole.restarts, broken.restarts) == (0, 1)
    assert_no_bit_differs((tmp_path / "whole", whole), (tmp_path / "broken", broken))
    assert check_run_audit(str(tmp_path / "broken")).ok
    assert sorted(_threads.rows_of(str(tmp_path / "whole"), "step")) == list(range(1, 26)), "no loss is left out"
    written = set(_threads.rows_of(str(tmp_path / "whole"), "checkpoint"))
    assert written and written <= {5, 8, 10, 15, 16, 20, 25}, "only at meetings"


def test_no_step_between_meetings_calls_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of weights divides the loss: ranks that train together add it up in each step."""
    from lockstep.training.steps.ordered import OrderedCalls  # imports TensorFlow

    def refused(*_: Any) -> Any:
        raise AssertionError("a call in a step")

    monkeypatch.setattr(OrderedCalls, "call", refused)
    write_clicks(tmp_path / "data", records={"train": 96, "test": 30})
    assert (
        train(str(tmp_path / "data"), tmp_path / "run", 2, f"{OWN}:weighed_clicks", epochs=1, sync_every=3).steps == 4
    )


def test_epochs_before_are_synchronous_and_other_ranks_can_continue(table: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "float64", "checkpoint_every": 8}
    train(table, tmp_path / "sync", 3, f"{OWN}:with_dropout", epochs=1, **options)
    local: dict[str, Any] = {**options, "sync_every": 4, "sync_until_epoch": 1}
    train(table, tmp_path / "local", 3, f"{OWN}:with_dropout", epochs=2, **local)
    losses = [_threads.rows_of(str(tmp_path / name), "step") for name in ("sync", "local")]
    assert [losses[0][step]["loss"] for step in range(1, 9)] == [losses[1][step]["loss"] for step in range(1, 9)]
    assert train(table, tmp_path / "local", 2, f"{OWN}:with_dropout", epochs=3, **local).steps == 25
