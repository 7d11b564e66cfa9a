"""Schedules the checkpoints of a run: all ranks begin one at the same step, and train on while it is written."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.training.config import TrainConfig
from lockstep.training.control.client import ControlClient
from lockstep.training.exchange.agreement import Agreement, NonFiniteError
from lockstep.training.exchange.compare_ranks import WeightCheck
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.rank.metrics import Saved, StepClock, StepReports
from lockstep.training.rules import CheckpointEvery

if TYPE_CHECKING:
    from lockstep.training.rank.saver import Progress, Saver

# A cautious guess for a shared cluster, where executors are preempted and nodes drained. It need not be good: a mean
# time that is 6 times off, either way, makes the cost of checkpoints and lost steps 1.43 times the least, which itself
# is sqrt(2 * cost / mean time), 0.8 % of the time for a checkpoint that costs half a second.
MEAN_TIME_BETWEEN_FAILURES_S = 4 * 3600.0
FIRST_S = 30.0  # of `auto`: the cost of a checkpoint is unknown before the first one
LEAST_COST_S = 0.001
LAST_WAIT_S = 30.0


def best_interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """The time between checkpoints that loses the least: sqrt(2 * cost * mean time between failures).

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. The correction of J.
    T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, matters
    only if the cost is a large part of the mean time; here it is less than a hundredth of the interval.
    """
    return math.sqrt(2.0 * cost_s * mean_time_between_failures_s)


class Schedule:
    """One rank's view of the schedule. Only the clock of rank 0 counts: it proposes, and all ranks agree.

    A checkpoint costs the time for which the training stops, and the time by which the steps during the writing exceed
    the median step before. `auto` uses the median cost of the last checkpoints.
    """

    def __init__(self, every: CheckpointEvery, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._costs: deque[float] = deque(maxlen=5)
        self._free: deque[float] = deque(maxlen=64)
        self._beside: list[float] = []
        self._step_began = self._begun = now()
        self.blocked_s = 0.0
        """How long the training stopped for the last checkpoint that was begun."""
        self.interval_s = FIRST_S if every == CheckpointEvery() else every.seconds
        """Seconds between two checkpoints; None if the schedule counts steps."""

    def due_at(self, step: int) -> bool:
        """Whether the schedule counts steps and a checkpoint follows this one; the same on every rank."""
        return self._every.steps is not None and step % self._every.steps == 0

    @property
    def wishes(self) -> bool:
        """Whether the interval has passed."""
        return self.interval_s is not None and self._now() - self._begun >= self.interval_s

    def step_ends(self, *, in_flight: bool) -> None:
        """A step has ended; `in_flight`: a checkpoint was being written during it."""
        took, self._step_began = self._now() - self._step_began, self._now()
        (self._beside if in_flight else self._free).append(took)

    def step_begins(self) -> None:
        """The next step begins now: what was done since the last one, such as a validation, is no part of its time."""
        self._step_began = self._now()

    def begun(self, blocked_s: float) -> None:
        """A checkpoint has been copied, for which the training stopped for `blocked_s`."""
        self._begun = self._step_began = self._now()
        self.blocked_s = blocked_s
        self._beside.clear()

    def skipped(self) -> None:
        """A checkpoint was skipped: the next one follows an interval from now."""
        self._begun = self._now()

    def committed(self) -> float:
        """The checkpoint is committed; returns its cost in seconds. Sets the interval of `auto`."""
        usual = statistics.median(self._free) if self._free else math.inf  # no step to compare with
        cost_s = self.blocked_s + max(0.0, sum(took - usual for took in self._beside))
        self._costs.append(cost_s)
        if self._every == CheckpointEvery():
            cost = max(LEAST_COST_S, statistics.median(self._costs))
            self.interval_s = best_interval_s(cost, MEAN_TIME_BETWEEN_FAILURES_S)
        return cost_s


log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one rank. Every rank makes the same calls after the same steps, and begins and skips the same
    checkpoints.

    A checkpoint is skipped while another one is in flight on any rank. A rank whose checkpoint is in flight sets a bit
    in the next step's control word, so that all ranks know it when they decide. `reports` is None except on rank 0.
    """

    def __init__(
        self,
        saver: Saver,
        exchange: Exchange,
        control: ControlClient,
        config: TrainConfig,
        clock: StepClock,
        weights: WeightCheck,
        reports: StepReports | None,
    ) -> None:
        self._saver, self._exchange, self._clock = saver, exchange, clock
        self._control, self._weights, self._reports = control, weights, reports
        self._limit_s = config.limits.stall_limit_s
        every = CheckpointEvery.parse(config.checkpoints.checkpoint_every)
        self._schedule = Schedule(every)
        self._keeps_best = config.checkpoints.keep_best is not None
        self._skipped = 0
        self._was_in_flight = False
        self._due = False  # since a step after which ranks were not equal
        self._asked = False  # and none has begun since

    def ask(self) -> None:
        """The driver asks for a checkpoint. It asks all ranks, which hear it at different steps: rank 0 passes it on,
        or a second one would follow.
        """
        if self._reports is not None:
            self._asked = True
            self._exchange.want("checkpoint")

    def step_ends(self) -> None:
        """Take a committed checkpoint, and set the next step's control word. Raises the error of a failed write."""
        self._schedule.step_ends(in_flight=self._was_in_flight)
        self._settle(self._saver.look())
        self._was_in_flight = self._saver.in_flight
        if self._was_in_flight:
            self._exchange.want("busy")
        else:
            self._exchange.withdraw("busy")  # of a step that no agreement has followed
        if self._reports is not None and self._schedule.wishes:
            self._exchange.want("checkpoint")

    def step_begins(self) -> None:
        """Note that a step begins, as `Schedule.step_begins` does."""
        self._schedule.step_begins()

    def begin_if_due(self, agreement: Agreement, progress: Progress, *, in_epoch: bool = False) -> None:
        """Begin the checkpoint of this step, if one is scheduled and none is in flight. Call it after `step_ends`."""
        self._due = self._due or self._schedule.due_at(agreement.step)
        if not agreement.equal:
            return
        due, self._due = self._due, False
        if not (due or agreement.checkpoint):
            return
        if not agreement.busy:
            self._begin(progress, in_epoch=in_epoch)
            return
        self._skipped += 1
        log.warning(
            "step %d: no checkpoint, since that of step %s is being written",
            agreement.step,
            self._saver.last_step,
        )
        if self._asked or (self._schedule.interval_s is None and not due):
            self._exchange.want("checkpoint")  # the request did not come from the clock: keep it
        else:
            self._exchange.withdraw("checkpoint")
        self._schedule.skipped()

    def epoch_ends(self, agreement: Agreement, progress: Progress) -> None:
        """Begin a checkpoint as `begin_if_due` does. A run that keeps the best checkpoint has one at the end of each
        epoch, where its metric is known: it waits for one in flight.
        """
        if not self._keeps_best:
            self.begin_if_due(agreement, progress)
            return
        self._wait(progress.step)
        self._begin(progress, in_epoch=False)

    def finish(self, progress: Progress, *, in_epoch: bool = False) -> None:
        """Wait for a checkpoint in flight at the end of the run or of this process, and write the checkpoint of the
        last step if there is none.

        Raises StorageTimeoutError naming rank, step and stage.
        """
        self._wait(progress.step)
        if self._saver.last_step != progress.step:
            self._begin(progress, in_epoch=in_epoch)
            self._wait(progress.step)

    def abandon(self, error: BaseException) -> None:
        """The run ends by `error`. If all ranks raise it (a loss that is not finite), wait for the checkpoint in
        flight. If only one rank does (a bad image), do not wait: the driver must get its error before the other ranks
        report that this rank is lost.
        """
        if isinstance(error, NonFiniteError):
            try:
                self._saver.wait(LAST_WAIT_S)
            except Exception as late:  # the run still ends by `error`
                log.warning("the checkpoint in flight was lost: %s", late)

    def _wait(self, step: int) -> None:
        self._control.beat(step, "wait for the checkpoint")
        with self._clock.checkpoint():
            self._settle(self._saver.wait(self._limit_s))

    def _begin(self, progress: Progress, *, in_epoch: bool) -> None:
        if self._reports is not None:
            self._reports.flush()  # steps before a checkpoint are not repeated: their rows must not be lost
        began = time.perf_counter()
        with self._clock.checkpoint():
            self._settle(self._saver.look())
            self._weights.compare(progress.step)
            self._saver.save(progress, in_epoch=in_epoch)
        self._exchange.withdraw("checkpoint")
        self._exchange.want("busy")
        self._was_in_flight, self._asked = True, False
        self._schedule.begun(time.perf_counter() - began)

    def _settle(self, saved: Saved | None) -> None:
        if saved is None:
            return
        cost_s = self._schedule.committed()
        if self._reports is not None:
            blocked_s = self._schedule.blocked_s
            self._reports.checkpoint(saved, blocked_s, cost_s, self._skipped, self._schedule.interval_s)
            log.info(
                "checkpoint of step %d: %d bytes, %.3f s blocked, %.1f s written during the steps, cost %.3f s%s",
                saved.step,
                saved.bytes,
                blocked_s,
                saved.written_s,
                cost_s,
                f"; the next in {self._schedule.interval_s:.0f} s" if self._schedule.interval_s else "",
            )
        self._skipped = 0
