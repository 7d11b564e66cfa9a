"""When checkpoints are due: every so many steps or seconds, or as often as their cost and failures make best."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A guess on the careful side for a shared cluster, where executors are preempted and nodes drained. It need not be
# good: a mean time that is 6 times off, either way, makes the cost of checkpoints and lost steps 1.43 times the least,
# which itself is sqrt(2 * cost / mean time), 0.8 % of the time for a checkpoint that costs half a second.
MEAN_TIME_BETWEEN_FAILURES_S = 4 * 3600.0
FIRST_S = 30.0  # of `auto`: what a checkpoint costs is not known before there is one
LEAST_COST_S = 0.001
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")
AUTO = "auto"
ALLOWED = "steps from 1 up (200), seconds above 0 (60s) or auto"


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """`steps`, or `seconds`, or neither: as often as is best (`auto`)."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> CheckpointEvery:
        """Of 200 or `200`, `60s`, `auto`; ValueError for anything else."""
        text = str(value)
        if text == AUTO:
            return cls()
        if text.isascii() and text.isdigit() and int(text) >= 1:
            return cls(steps=int(text))
        found = _SECONDS.fullmatch(text)
        if found is None or float(found[1]) <= 0:
            raise ValueError(ALLOWED)
        return cls(seconds=float(found[1]))


def best_interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """The time between checkpoints that loses least: sqrt(2 * cost * mean time between failures).

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. What J. T. Daly, A
    higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, adds to it counts
    where the cost is no small part of the mean time; here it is less than a hundredth of the interval.
    """
    return math.sqrt(2.0 * cost_s * mean_time_between_failures_s)


class Schedule:
    """One rank's view of the schedule. Of clocks only rank 0's counts: it wishes, and all ranks agree.

    A checkpoint's cost is what the training loses by it: the time it stands still, and what the steps beside the
    writing take longer than the median of those before. `auto` goes by the median cost of the last checkpoints.
    """

    def __init__(
        self, every: CheckpointEvery, mean_time_between_failures_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._mtbf_s, self._now = every, mean_time_between_failures_s, now
        self._costs: deque[float] = deque(maxlen=5)
        self._free: deque[float] = deque(maxlen=64)
        self._beside: list[float] = []
        self._step_began = self._begun = now()
        self.blocked_s = 0.0
        """How long the training stood still for the checkpoint that was begun last."""
        self.interval_s = FIRST_S if every == CheckpointEvery() else every.seconds
        """Between two checkpoints; None where steps count."""

    def due_at(self, step: int) -> bool:
        """Whether the number of steps alone makes one due, on every rank alike."""
        return self._every.steps is not None and step % self._every.steps == 0

    @property
    def wishes(self) -> bool:
        """Whether the clock says that one is due."""
        return self.interval_s is not None and self._now() - self._begun >= self.interval_s

    def step_ends(self, *, in_flight: bool) -> None:
        """A step is over, beside which a checkpoint was written or not."""
        took, self._step_began = self._now() - self._step_began, self._now()
        (self._beside if in_flight else self._free).append(took)

    def begun(self, blocked_s: float) -> None:
        """A checkpoint has been copied, for which the training stood still so long."""
        self._begun = self._step_began = self._now()
        self.blocked_s = blocked_s
        self._beside.clear()

    def skipped(self) -> None:
        """One that was due is left out: the next is due an interval from now."""
        self._begun = self._now()

    def committed(self) -> float:
        """The one that was begun is committed; what it has cost in seconds. Sets the interval of `auto`."""
        usual = statistics.median(self._free) if self._free else math.inf  # without another step nothing was slower
        cost_s = self.blocked_s + max(0.0, sum(took - usual for took in self._beside))
        self._costs.append(cost_s)
        if self._every == CheckpointEvery():
            cost = max(LEAST_COST_S, statistics.median(self._costs))
            self.interval_s = best_interval_s(cost, self._mtbf_s)
        return cost_s
