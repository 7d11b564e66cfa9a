"""Losses and metrics on their way to the driver, several steps a message."""

from __future__ import annotations

import time
from typing import Any

from training.control.client import ControlClient

ROWS, SECONDS = 20, 1.0  # a message at most so often: it must not cost steps


class StepReports:
    """Rows {kind: step, step, epoch, loss, seconds} and {kind: epoch, step, epoch, metrics, seconds} of rank 0."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._rows: list[dict[str, Any]] = []
        self._began = self._sent = time.monotonic()

    def learning_rate(self, done: dict[str, Any]) -> None:
        """What was done to the model's learning rate, at the start of the process: a row {kind: learning_rate}."""
        self._add({"kind": "learning_rate", "step": 0, **done})

    def step(self, step: int, epoch: int, loss: float, *, skipped: bool = False) -> None:
        """The loss over the global batch of optimizer step `step` (from 1); `skipped`: no weight has changed."""
        self._add(
            {"kind": "step", "step": step, "epoch": epoch, "loss": loss, **({"skipped": True} if skipped else {})}
        )
        if len(self._rows) >= ROWS or time.monotonic() - self._sent >= SECONDS:
            self.flush()

    def epoch(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:
        """The metrics of an epoch (from 0) over all ranks."""
        self._add({"kind": "epoch", "step": step, "epoch": epoch, "metrics": metrics})
        self.flush()

    def flush(self) -> None:
        """Send what is there."""
        if self._rows:
            self._control.notify("metrics", rows=self._rows)
        self._rows, self._sent = [], time.monotonic()

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append({**row, "seconds": round(time.monotonic() - self._began, 3)})
