"""Ends a run whose metric has stopped improving (--early-stop), the same at any number of ranks and after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from lockstep.storage.errors import require
from lockstep.training.rules import StopRule, check_metric, of_validation


class EarlyStop(keras.callbacks.Callback):
    """Last in the list of callbacks: it stops the training at the end of the epoch where the rule's patience ends.

    All ranks see the same logs, so all decide alike. A checkpoint keeps `state`, which a later call may resume under
    another rule, or under none. `judged` says whether an epoch counts: one that --max-steps cut does when a later call
    has trained the rest.
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

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        rule, best = self._rule, None if self.best is None else repr(self.best)  # it may be infinite
        of_rule = {"metric": rule.metric, "way": rule.way, "patience": rule.patience}
        return {**of_rule, "best": best, "best_epoch": self.best_epoch, "waited": self.waited, "reason": self.reason}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of a checkpoint: a rule of another metric begins to judge now, one of another
        patience counts the epochs that were judged before.
        """
        rule = self._rule
        if (state["metric"], state["way"]) != (rule.metric, rule.way):
            return
        self.best = None if state["best"] is None else float(state["best"])
        self.best_epoch, self.waited = state["best_epoch"], state["waited"]
        if state["patience"] == rule.patience:
            self.reason = state["reason"]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Judge the epoch, if it has the metric."""
        rule, logs = self._rule, logs or {}
        check_metric(rule.best, logs, "--early-stop")
        if rule.metric not in logs or not self._judged(epoch):
            return
        value = logs[rule.metric]
        require(isinstance(value, int | float), f"{rule.metric} of --early-stop", repr(value), "a metric of one number")
        if rule.improves(value, self.best):
            self.best, self.best_epoch, self.waited = float(value), epoch, 0
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
