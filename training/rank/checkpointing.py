"""Checkpoints in the course of a run: begun where they are due on all ranks, written beside the steps, waited for."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from training.config import TrainConfig
from training.control.client import ControlClient
from training.exchange.agreement import Agreement, NonFiniteError
from training.exchange.exchange import Exchange
from training.exchange.weight_check import WeightCheck
from training.rank.checkpoint_schedule import CheckpointEvery, Schedule
from training.rank.metrics import StepReports
from training.rank.saved import Saved
from training.rank.step_clock import StepClock

if TYPE_CHECKING:  # they bring Keras
    from training.rank.saver import Progress, Saver

LAST_WAIT_S = 30.0
log = logging.getLogger(__name__)


class Checkpoints:
    """One rank's; every rank makes the same calls after the same steps, and begins and skips the same checkpoints.

    One that falls due while another is in flight on any rank is skipped. A rank whose own is in flight says so in the
    control word of the next step, so that all know it when they decide. `reports` is rank 0's, None on the others.
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
        self._compare_every, self._limit_s = config.compare_every, config.stall_limit_s
        every = CheckpointEvery.parse(config.checkpoint_every)
        self._schedule = Schedule(every, config.mean_time_between_failures_s)
        self._keeps_best = config.keep_best is not None
        self._skipped = 0
        self._was_in_flight = False

    def step_ends(self) -> None:
        """Take what was committed, and say for the next step what this rank knows. Raises what ended a writing."""
        self._schedule.step_ends(in_flight=self._was_in_flight)
        self._settle(self._saver.look())
        self._was_in_flight = self._saver.in_flight
        if self._was_in_flight:
            self._exchange.want("busy")
        if self._reports is not None and self._schedule.wishes:
            self._exchange.want("checkpoint")

    def begin_if_due(self, agreement: Agreement, progress: Progress, *, in_epoch: bool = False) -> None:
        """Begin the checkpoint of this step, if it is due and none is in flight; once a step, after `step_ends`."""
        due = self._schedule.due_at(agreement.step)
        if not (due or agreement.checkpoint):
            return
        if not agreement.busy:
            self._begin(progress, in_epoch=in_epoch)
            return
        self._skipped += 1
        log.warning("step %d: no checkpoint, since that of step %s is in flight", agreement.step, self._saver.last_step)
        if self._schedule.interval_s is None and not due:
            self._exchange.want("checkpoint")  # somebody's wish, and not the clock's: it holds
        else:
            self._exchange.withdraw("checkpoint")
        self._schedule.skipped()

    def epoch_ends(self, agreement: Agreement, progress: Progress) -> None:
        """As `begin_if_due`. A run that keeps the best checkpoint has one of each epoch's end, which is where they are
        judged: one that is in flight is waited for.
        """
        if not self._keeps_best:
            self.begin_if_due(agreement, progress)
            return
        self._wait(progress.step)
        self._begin(progress, in_epoch=False)

    def finish(self, progress: Progress) -> None:
        """At the end of the run: wait for what is in flight, and write the last step's if it is not.

        Raises StorageTimeoutError naming rank, step and what is waited for.
        """
        self._wait(progress.step)
        if self._saver.last_step != progress.step:
            self._begin(progress, in_epoch=False)
            self._wait(progress.step)

    def abandon(self, error: BaseException) -> None:
        """The run ends by `error`. Where all ranks meet the same (a loss that is not finite), what is in flight ends
        well and is waited for. Where one rank alone does (a bad image), the others end by its loss and report nothing,
        and the driver must hear of the cause before it hears of them.
        """
        if isinstance(error, NonFiniteError):
            try:
                self._saver.wait(LAST_WAIT_S)
            except Exception as late:  # the run ends by `error` all the same
                log.warning("the checkpoint in flight was lost: %s", late)

    def _wait(self, step: int) -> None:
        self._control.beat(step, "wait for the checkpoint")
        with self._clock.checkpoint():
            self._settle(self._saver.wait(self._limit_s))

    def _begin(self, progress: Progress, *, in_epoch: bool) -> None:
        if self._reports is not None:
            self._reports.flush()  # steps before a checkpoint are not made again: their rows must not be lost
        began = time.perf_counter()
        with self._clock.checkpoint():
            self._settle(self._saver.look())
            if progress.step % self._compare_every:  # else they were compared at the end of the step
                self._weights.compare(progress.step)
            self._saver.save(progress, in_epoch=in_epoch)
        self._exchange.withdraw("checkpoint")
        self._exchange.want("busy")
        self._was_in_flight = True
        self._schedule.begun(time.perf_counter() - began)

    def _settle(self, saved: Saved | None) -> None:
        if saved is None:
            return
        cost_s = self._schedule.committed()
        if self._reports is not None:
            blocked_s = self._schedule.blocked_s
            self._reports.checkpoint(saved, blocked_s, cost_s, self._skipped, self._schedule.interval_s)
            log.info(
                "checkpoint of step %d: %d bytes, %.3f s blocked, %.1f s written beside the steps, cost %.3f s%s",
                saved.step,
                saved.bytes,
                blocked_s,
                saved.written_s,
                cost_s,
                f"; the next in {self._schedule.interval_s:.0f} s" if self._schedule.interval_s else "",
            )
        self._skipped = 0
