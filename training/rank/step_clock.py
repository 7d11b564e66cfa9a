"""Where a rank's time goes: waiting for data, computing, waiting for the all-reduce, writing checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

ROW_EVERY_S = 1.0  # a row at most so often: it must not cost steps
PARTS = ("data_s", "compute_s", "exchange_s", "checkpoint_s", "other_s")


class Told(Protocol):
    """Who takes the rows: a ControlClient does."""

    def notify(self, kind: str, **fields: Any) -> None:
        """`kind` is metrics, `fields` {rows: [row]}."""


class StepClock:
    """Rows {kind: time, rank, step, steps, data_s, compute_s, exchange_s, checkpoint_s, other_s} of one rank, seconds.

    `step` is the last one of the row, `steps` how many it sums up. `data_s` is how long a step had begun before its
    batch was there, `exchange_s` how long the step stood still for the all-reduce (what ran beside the backward pass
    costs nothing and is not in it), `compute_s` the rest of the steps, `other_s` what lay between them: callbacks,
    ends of epochs. `waited()` returns the exchange's wait of the last step in seconds.
    """

    def __init__(
        self,
        control: Told,
        rank: int,
        waited: Callable[[], float],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._control, self._rank, self._waited, self._now = control, rank, waited, now
        self._ready: dict[int, float] = {}
        self._begun: float | None = None
        self._steps = self._last_step = 0
        self._start_row()

    def batch_is_ready(self, number: int) -> None:
        """Batch `number` (from 0) was handed to TensorFlow; called by the thread that reads ahead."""
        self._ready[number] = self._now()

    def begins(self) -> None:
        """A step begins: it now waits for its batch, if that is not there yet."""
        self._begun = self._now()

    def ends(self, step: int) -> None:
        """Step `step` (from 1), which took batch `step - 1`, is done."""
        now, begun = self._now(), self._begun
        if begun is None:  # a loop that does not say when its steps begin
            return
        self._begun = None
        ready = self._ready.pop(step - 1, begun)
        data = min(max(0.0, ready - begun), now - begun)
        exchange = min(self._waited(), now - begun - data)
        self._sums["data_s"] += data
        self._sums["exchange_s"] += exchange
        self._sums["compute_s"] += now - begun - data - exchange
        self._steps, self._last_step = self._steps + 1, step
        if now - self._row_began >= ROW_EVERY_S:
            self.flush()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """The time inside is a checkpoint's."""
        began = self._now()
        try:
            yield
        finally:
            self._sums["checkpoint_s"] += self._now() - began

    def flush(self) -> None:
        """Send what there is."""
        if self._steps:
            elapsed = self._now() - self._row_began
            self._sums["other_s"] = max(0.0, elapsed - sum(self._sums.values()))
            rounded = {name: round(seconds, 6) for name, seconds in self._sums.items()}
            row: dict[str, Any] = {"kind": "time", "rank": self._rank, "step": self._last_step, "steps": self._steps}
            self._control.notify("metrics", rows=[row | rounded])
            self._start_row()

    def _start_row(self) -> None:
        self._row_began = self._now()
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._steps, self._last_step = 0, 0
