"""The loop around a profile's steps: what RunCallbacks tells, timed from one step to another."""

from __future__ import annotations

import time
from typing import Any

from lockstep.storage.errors import LockstepError
from training.control.client import ControlClient
from training.exchange.exchange import Exchange
from training.rank.callbacks import RunCallbacks
from training.rank.step_clock import PARTS, StepClock


class ProfileLoop:
    """Times steps `settling` + 1 .. `settling` + `steps` of one `fit` call, whose first batch is number `first`."""

    def __init__(
        self, control: ControlClient, rank: int, exchange: Exchange, kind: str, first: int, settling: int, steps: int
    ) -> None:
        self._control, self._exchange, self._kind = control, exchange, kind
        self._first, self._settling, self._steps = first, settling, steps
        self._rows: list[dict[str, Any]] = []
        self.clock = StepClock(self, rank, lambda: exchange.waited_s)
        self._done = 0
        self._began = self._ended = (0.0, 0.0)

    @property
    def all_steps(self) -> int:
        """Of the `fit` call."""
        return self._settling + self._steps

    def notify(self, kind: str, **fields: Any) -> None:
        """What the clock tells."""
        self._rows += fields["rows"]

    def callbacks(self, model: Any, micro_batches: int) -> RunCallbacks:
        """For the `fit` call; the model's own callbacks are not asked."""
        callbacks = RunCallbacks([], model, self, epochs=1, steps=self.all_steps, micro_batches=micro_batches)
        callbacks.begin()
        return callbacks

    def result(self) -> dict[str, float]:
        """{steps, seconds, cpu_s (of the process), data_s, compute_s, exchange_s, checkpoint_s, other_s}."""
        sums = {part: sum(float(row[part]) for row in self._rows) for part in PARTS}
        return {
            "steps": float(self._steps),
            "seconds": self._ended[0] - self._began[0],
            "cpu_s": self._ended[1] - self._began[1],
            **sums,
        }

    # What RunCallbacks tells

    def epoch_begins(self, epoch: int) -> bool:
        """Nothing is kept of the metrics."""
        return True

    def step_begins(self) -> None:
        """The step's time runs."""
        self.clock.begins()

    def step_ends(self, epoch: int) -> None:
        """Count it; the measuring begins and ends here."""
        agreement = self._exchange.agreement
        if agreement is None or agreement.step != self._exchange.step:
            raise LockstepError(
                "a step was not exchanged between the ranks",
                got="a train_step that does not call optimizer.apply_gradients once",
                allowed="one call a step",
                next_step="Call self.optimizer.apply_gradients or apply once in the model's train_step.",
            )
        self._done += 1
        self.clock.ends(self._first + self._done)
        self._control.beat(agreement.step, f"measure steps: {self._kind}")
        if self._done == self._settling:
            self.clock.flush()
            self._rows.clear()
            self._began = _now()
        elif self._done == self._settling + self._steps:
            self._ended = _now()
            self.clock.flush()

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """As they are: nobody reads them."""
        return logs

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Nothing is written."""


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
