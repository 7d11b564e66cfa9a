"""The callbacks of a run: what they see after a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow


class Loop:
    """A run that notes the ends of its steps."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def epoch_begins(self, epoch: int) -> bool:
        return True

    def step_begins(self) -> None:
        self.ended.append(0)

    def step_ends(self, epoch: int) -> None:
        self.ended[-1] += 1

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        return logs

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        raise AssertionError("no epoch ends here")


def test_the_hooks_of_a_validation_are_those_of_keras() -> None:
    import keras

    from lockstep.training.rank.callbacks import RunCallbacks
    from tests.training._models import Tested

    model, x, y = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), np.ones((6, 1)), np.ones(6)
    model.compile("sgd", "mse", metrics=["mae"])
    theirs, ours = Tested(), Tested()
    model.fit(x, y, validation_data=(x, y), batch_size=4, verbose=0, callbacks=[theirs])
    callbacks = RunCallbacks([ours], model, Loop(), epochs=1, steps=1)
    callbacks.test_begins()
    assert [name for name, *_ in ours.events] == ["test begins"]
    found = model.evaluate(x, y, batch_size=4, verbose=0, callbacks=callbacks, return_dict=True)
    callbacks.test_ends(found)
    assert ours.events == [event for event in theirs.events if event[0] != "epoch ends"]
    assert [name for name, *_ in ours.events] == ["test begins", *["batch begins", "batch ends"] * 2, "test ends"]


def test_a_batch_is_an_optimizer_step_and_metrics_may_be_arrays() -> None:
    """F1Score gives a value a class."""
    import keras

    from lockstep.training.rank.callbacks import RunCallbacks

    seen: list[Any] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: seen.append((batch, logs)))
    model, loop = keras.Sequential([keras.layers.Dense(1)]), Loop()
    callbacks = RunCallbacks([watch], model, loop, epochs=1, steps=2, micro_batches=2)
    callbacks.starts_at(5)
    for call in range(4):
        callbacks.on_train_batch_begin(call)
        callbacks.on_train_batch_end(call, {"loss": np.float32(0.5), "f1": np.array([0.25, 0.75], np.float32)})
    assert seen == [(step, {"loss": 0.5, "f1": [0.25, 0.75]}) for step in (5, 6)]
    assert loop.ended == [1, 1]
