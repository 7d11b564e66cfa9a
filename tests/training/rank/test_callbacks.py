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


def test_a_batch_is_an_optimizer_step_and_metrics_may_be_arrays() -> None:
    """F1Score gives a value a class."""
    import keras

    from training.rank.callbacks import RunCallbacks

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
