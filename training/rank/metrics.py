"""Losses and metrics on their way to the driver, several steps a message."""

from __future__ import annotations

import time
from typing import Any

from training.control.client import ControlClient
from training.rank.saved import Saved

ROWS, SECONDS = 20, 1.0  # a message at most so often: it must not cost steps


class StepReports:
    """Rows {kind: step, step, epoch, loss, seconds} and {kind: epoch, step, epoch, metrics, class_counts, seconds} of
    rank 0.

    A step that was skipped says `skipped`, its epoch how many were since this process began.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._rows: list[dict[str, Any]] = []
        self._skipped = 0
        self._began = self._sent = time.monotonic()

    def learning_rate(self, done: dict[str, Any]) -> None:
        """What was done to the model's learning rate, at the start of the process: a row {kind: learning_rate}."""
        self._add({"kind": "learning_rate", "step": 0, **done})

    def step(self, step: int, epoch: int, loss: float, *, skipped: bool = False) -> None:
        """The loss over the global batch of optimizer step `step` (from 1); `skipped`: no weight has changed."""
        self._skipped += skipped
        self._add(
            {"kind": "step", "step": step, "epoch": epoch, "loss": loss, **({"skipped": True} if skipped else {})}
        )
        if len(self._rows) >= ROWS or time.monotonic() - self._sent >= SECONDS:
            self.flush()

    def epoch(self, step: int, epoch: int, metrics: dict[str, Any], class_counts: list[int] | None) -> None:
        """The metrics of an epoch (from 0) over all ranks, and how many of its rows were of each class, if known."""
        more: dict[str, Any] = {"skipped": self._skipped} if self._skipped else {}
        more |= {"class_counts": class_counts} if class_counts is not None else {}
        self._skipped = 0
        self._add({"kind": "epoch", "step": step, "epoch": epoch, "metrics": metrics, **more})
        self.flush()

    def checkpoint(self, saved: Saved, blocked_s: float, cost_s: float, skipped: int, interval_s: float | None) -> None:
        """A checkpoint that is committed, and how many were skipped since the one before.

        The training stood still for `blocked_s` and lost `cost_s` in all; the next is due in `interval_s` seconds, None
        where steps count. `bytes` are those of rank 0's file.
        """
        self._add(
            {
                "kind": "checkpoint",
                "step": saved.step,
                "bytes": saved.bytes,
                "blocked_s": round(blocked_s, 6),
                "written_s": round(saved.written_s, 6),
                "cost_s": round(cost_s, 6),
                "skipped": skipped,
                "interval_s": None if interval_s is None else round(interval_s, 3),
            }
        )

    def flush(self) -> None:
        """Send what is there."""
        if self._rows:
            self._control.notify("metrics", rows=self._rows)
        self._rows, self._sent = [], time.monotonic()

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append({**row, "seconds": round(time.monotonic() - self._began, 3)})
