"""Ends a run whose metric has stopped improving (--early-stop), the same at any number of ranks and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from lockstep.storage.errors import require
from training.rules import StopRule, check_metric, of_validation


class EarlyStop(keras.callbacks.Callback):
    """Last in the list of callbacks: it stops the training at the end of the epoch where the rule's patience ends.

    All ranks see the same logs, so all decide alike. Its attributes are plain values, which a checkpoint keeps.
    `judged` says whether an epoch counts: one that --max-steps cut does when a later call has trained the rest.
    """

    def __init__(self, rule: StopRule, judged: Callable[[int], bool]) -> None:
        super().__init__()
        self._rule, self._judged = rule, judged
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.waited = 0
        """Judged epochs since the best one."""
        self.reason: str | None = None
        """Why the run has ended; None while it may continue."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Judge the epoch, if it has the metric."""
        rule, logs = self._rule, logs or {}
        check_metric(rule.best, logs, "--early-stop")
        if rule.metric not in logs or not self._judged(epoch):
            return
        value = logs[rule.metric]
        require(isinstance(value, int | float), f"{rule.metric} of --early-stop", repr(value), "a metric of one number")
        if rule.improves(value, self.best):
            self.best, self.best_epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        if self.waited >= rule.patience:
            judged = "validations" if of_validation(rule.metric) else "epochs"
            best = (
                f"best {self.best:.6g} in epoch {self.best_epoch + 1}"
                if self.best_epoch is not None
                else "never a number"
            )
            self.reason = (
                f"--early-stop {rule.best}:{rule.patience}: no better {rule.metric} in {self.waited} {judged} ({best})"
            )
            self.model.stop_training = True
