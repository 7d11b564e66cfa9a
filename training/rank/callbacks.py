"""Runs the user's callbacks over a run that is one `fit` call of Keras an epoch.

Epochs differ by one step, and a run may resume in the middle of one; a single `fit` call cannot do that. Every call
gets the same list, so that callbacks see one training: on_train_begin and on_train_end once, and their state is kept.
"""

from __future__ import annotations

from typing import Any, Protocol

import keras

from lockstep.training.steps.model_state import as_floats


class Loop(Protocol):
    """What the run does at the boundaries of steps and epochs."""

    def epoch_begins(self, epoch: int) -> bool:
        """Called after Keras has reset the metrics; returns False if the epoch began before this process."""

    def step_begins(self) -> None:
        """Called before each optimizer step."""

    def step_ends(self, epoch: int) -> None:
        """Called after each optimizer step, once the callbacks have seen it."""

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs of the epoch over all ranks, from those of this rank."""

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called once the callbacks have seen the end of the epoch."""


class RunCallbacks(keras.callbacks.CallbackList):
    """Keras' CallbackList for a training that begins with `begin` and ends with `end`.

    At the end of an epoch and of a test, which is a validation, callbacks get the metrics over all ranks, the same on
    each; after a batch, loss and metrics of this rank so far. Callbacks without batch hooks cost no time in a step. A
    batch is an optimizer step, of `micro_batches` calls; in a test it is one of this rank's part.
    """

    def __init__(
        self, callbacks: list[Any], model: keras.Model, loop: Loop, *, epochs: int, steps: int, micro_batches: int = 1
    ) -> None:
        super().__init__(callbacks, add_history=True, model=model, epochs=epochs, steps=steps, verbose=0)
        self.loop, self._epoch, self._micro_batches = loop, 0, micro_batches
        self._first_batch = 0
        self._on_begin_of_batch = [c for c in self.callbacks if _has(c, "on_train_batch_begin", "on_batch_begin")]
        self._on_end_of_batch = [c for c in self.callbacks if _has(c, "on_train_batch_end", "on_batch_end")]
        self._on_begin_of_test_batch = [c for c in self.callbacks if _has(c, "on_test_batch_begin")]
        self._on_end_of_test_batch = [c for c in self.callbacks if _has(c, "on_test_batch_end")]

    def begin(self) -> None:
        """Begin the training."""
        super().on_train_begin()

    def end(self, logs: dict[str, Any]) -> None:
        """End the training; `logs` are the last epoch's."""
        super().on_train_end(logs)

    def test_begins(self) -> None:
        """Begin a validation."""
        super().on_test_begin({})

    def test_ends(self, logs: dict[str, Any]) -> None:
        """End a validation; `logs` are its metrics over all ranks."""
        super().on_test_end(logs)

    def starts_at(self, batch: int) -> None:
        """Resume the next epoch with its batch number `batch`."""
        self._first_batch = batch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Do nothing when the `fit` call of an epoch begins."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Do nothing when the `fit` call of an epoch ends."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Call the callbacks, unless the epoch is resumed after a restart."""
        self._epoch = epoch
        if self.loop.epoch_begins(epoch):
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Call callbacks that have this hook, then begin the step; only for its first micro-batch."""
        batch, micro = divmod(batch, self._micro_batches)
        if micro:
            return
        for callback in self._on_begin_of_batch:
            callback.on_train_batch_begin(batch + self._first_batch, logs={})
        self.loop.step_begins()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Call callbacks that have this hook, then end the step; only after its last micro-batch."""
        batch, micro = divmod(batch, self._micro_batches)
        if micro + 1 < self._micro_batches:
            return
        if self._on_end_of_batch:
            values = as_floats(logs or {})
            for callback in self._on_end_of_batch:
                callback.on_train_batch_end(batch + self._first_batch, logs=values)
        self.loop.step_ends(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Call the callbacks with the metrics over all ranks."""
        values = self.loop.epoch_logs(dict(logs or {}))
        for callback in self.callbacks:  # one dict for all callbacks: ReduceLROnPlateau adds the learning rate to it
            callback.on_epoch_end(epoch, values)
        self.loop.epoch_ends(epoch, values)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Do nothing when `evaluate` begins this rank's part of a validation."""

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Do nothing when `evaluate` ends this rank's part of a validation."""

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Call callbacks that have this hook."""
        for callback in self._on_begin_of_test_batch:
            callback.on_test_batch_begin(batch, logs={})

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Call callbacks that have this hook."""
        if self._on_end_of_test_batch:
            values = as_floats(logs or {})
            for callback in self._on_end_of_test_batch:
                callback.on_test_batch_end(batch, logs=values)


def _has(callback: Any, *hooks: str) -> bool:
    """Whether a callback has one of these hooks: in its class, or set on the instance as by LambdaCallback."""
    plain = keras.callbacks.Callback
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(plain, hook) for hook in hooks)
