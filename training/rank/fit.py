"""Runs the training in one rank: build, restore, `model.fit` epoch by epoch, checkpoints, export."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from lockstep.training.batches.audit_log import AuditLog
from lockstep.training.batches.feed import eval_batches
from lockstep.training.comm.base import SoloCommunicator
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import RankResult
from lockstep.training.control.protocol import json_safe
from lockstep.training.exchange.agreement import Agreement
from lockstep.training.exchange.compare_ranks import compare_runs, processor, versions
from lockstep.training.models.on_disk import load_initial
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.mixture import steps_asked
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.checkpointing import Checkpoints
from lockstep.training.rank.class_counts import ClassCounts
from lockstep.training.rank.client_rounds import ClientRounds
from lockstep.training.rank.early_stop import EarlyStop
from lockstep.training.rank.export import export_model, pieces_for_first, whole_model
from lockstep.training.rank.metrics import StepClock, StepReports, reading_row
from lockstep.training.rank.opening import RankData
from lockstep.training.rank.planned_epochs import PlannedEpochs
from lockstep.training.rank.prepare import JoinedModel, agreement_on
from lockstep.training.rank.saver import Progress, Saver
from lockstep.training.rank.validation import Beats, Validation
from lockstep.training.rules import StopRule, of_validation
from lockstep.training.run.weights_source import FISHER_FILE, fisher_at
from lockstep.training.scoring.score_split import takes_logits
from lockstep.training.steps.distribute_checks import compare_start
from lockstep.training.steps.ewc import BATCH_ROWS, Earlier, fisher_of, stored_fisher, with_earlier
from lockstep.training.steps.model_state import (
    METRICS,
    as_floats,
    derive_seeds,
    model_identity,
    variables_of,
)
from lockstep.training.steps.other_optimizers import others_of
from lockstep.training.steps.own_fit import of_all_ranks, only_on_leader
from lockstep.training.ways import Delay, Federated


def losses_of(agreement: Agreement) -> list[tuple[int, float]]:
    """Each step that the ranks have agreed on now, and its loss; none for a step that a rank did by itself."""
    losses = (agreement.losses or (agreement.loss,)) if agreement.agreed else ()
    return list(enumerate(losses, agreement.step - len(losses) + 1))


class Epochs(Protocol):
    """How a rank reads the samples of each epoch, and how it trains on them: by an epoch plan, or by clients."""

    audit: AuditLog | None
    share: float
    """This rank's part of the rows of a step."""

    @property
    def plan(self) -> RunPlan:
        """The plan of the run."""

    @property
    def joined(self) -> JoinedModel:
        """The model that is trained."""

    def begin(self, clock: StepClock) -> None:
        """Prepare to train, before the checkpoint is restored."""

    def check(self, step: int) -> None:
        """Raise ConfigError if ranks would train another model than one rank in the step after `step`."""

    def train(self, epoch: int, first: int, last: int, callbacks: RunCallbacks) -> None:
        """Train steps first..last-1, which are of one epoch, and call `callbacks` as Keras does."""

    def forget(self, step: int) -> None:
        """Steps up to `step` need no names of samples any more."""

    def end(self) -> None:
        """End all reading."""

    def finalize(self) -> None:
        """Do what follows the last step, before the model is exported."""

    def samples(self, first: int, last: int) -> int:
        """Samples that all ranks train on in steps first..last-1."""

    def left_over(self, step: int) -> list[str]:
        """The ids, in hex, of the samples that the epochs up to `step` leave."""


class _Left(Exception):
    """All ranks have written a checkpoint and end here, in the middle of Keras' `fit`."""


class Fit(AbstractContextManager["Fit"]):
    """One rank's part of a run. Every rank makes the same calls in the same order."""

    def __init__(self, context: RankContext, config: TrainConfig) -> None:
        self._context, self._config, world = context, config, context.world
        self._data = data = RankData.opened(context, config)
        self._counts = ClassCounts(data.signature)
        made = ClientRounds if isinstance(config.way, Federated) else PlannedEpochs
        self._epochs: Epochs = made(context, config, data, self._counts)
        self._plan, self._joined = self._epochs.plan, self._epochs.joined
        self._model, self._exchange = self._joined.model, self._joined.exchange
        self._strategy = self._joined.strategy
        self._comm, self._data_comm = self._strategy.communicator, self._strategy.data
        self._steps = steps_asked(self._plan, config.data.epochs, config.validation.max_steps)
        callbacks = [only_on_leader(callback, world.rank) for callback in self._joined.callbacks]
        self._early_stop: EarlyStop | None = None
        if config.validation.early_stop is not None:
            self._early_stop = EarlyStop(StopRule.parse(config.validation.early_stop), self._is_judged)
            callbacks.append(self._early_stop)
        self._callbacks = RunCallbacks(
            callbacks,
            self._model,
            self,
            epochs=config.data.epochs,
            steps=max(1, self._plan.total // self._plan.global_batch),
            micro_batches=config.step.micro_batches,
        )
        self._reports = StepReports(context.control) if world.is_leader else None
        if self._reports is not None and self._joined.learning_rate is not None:
            self._reports.learning_rate(self._joined.learning_rate.to_json())
        self._clock = StepClock(context.control, world.rank, self._exchange, num_ranks=world.num_ranks)
        saved = [callback for callback in self._callbacks.callbacks if callback is not self._early_stop]
        self._saver = Saver(context, config, self._joined, saved, self._early_stop, self._epochs.audit)
        self._validation: Validation | None = None
        if data.held_out:
            self._validation = Validation(data.held_out, config, self._joined, context.control, self._callbacks)
        self._validated: dict[str, Any] | None = None  # at the end of this epoch
        self._own_metrics: list[tuple[Any, Any]] = []  # variables and values of this rank, at the end of a cut epoch
        self._progress = Progress(step=0, stopped=False, metrics={})
        self._stop_wanted = False
        self._weights = self._strategy.weight_check(self._model)
        self._checkpoints = Checkpoints(
            self._saver, self._exchange, context.control, config, self._clock, self._weights, self._reports
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._joined.abort(error)
            self._checkpoints.abandon(error)
        self._joined.close()

    def run(self) -> dict[str, Any]:
        """Train the rest of the run; returns the rank's result."""
        control = self._context.control
        self._epochs.begin(self._clock)
        control.beat(0, "restore")
        self._restore()
        if (earlier := self._joined.earlier) is not None and self._config.model.ewc is not None:
            earlier.pull(self._model, self._config.model.ewc)
        control.beat(self._progress.step, "compare with the other ranks")
        self._compare_ranks()
        if self._goes_on:
            self._epochs.check(self._progress.step)
        self._saver.make_ready()
        began_at, began = self._progress.step, time.perf_counter()
        control.beat(began_at, "train")
        try:
            while self._goes_on:
                self._train_epoch()
        except _Left:
            return RankResult(steps=self._progress.step, left=True).to_json()
        finally:
            self._epochs.end()
        validation_s = 0.0 if self._validation is None else self._validation.seconds
        seconds = time.perf_counter() - began - validation_s
        left_over = self._finish()
        step = self._progress.step
        return RankResult(
            steps=step,
            metrics=json_safe(self._progress.metrics),
            samples=self._epochs.samples(began_at, step),
            seconds=seconds,
            first_step_s=self._clock.first_step_s(began),
            samples_per_s=self._samples_per_s(step),
            validation_s=validation_s,
            stopped_by=self._stopped_by(),
            watching=self._watching(),
            left_over=left_over,
            class_counts=self._counts.last,
        ).to_json()

    @property
    def _goes_on(self) -> bool:
        return self._progress.step < self._steps and not self._progress.stopped

    def _restore(self) -> None:
        """Load the last checkpoint, or begin the run. A collective."""
        restored, config = self._saver.find(), self._config
        self._callbacks.begin()
        if restored is None:
            if (first_weights := self._data.order.first_weights) is not None:
                self._strategy.complete()
                load_initial(self._model, first_weights)
                if config.model.ewc:
                    self._joined.earlier = Earlier.begun(self._model, *fisher_at(first_weights))
            if self._data_comm.num_ranks > 1:
                derive_seeds(self._model, config.data.seed, 0, self._data_comm.rank)
            return
        self._progress = self._saver.restore(restored)
        if self._progress.class_counts is not None:
            self._counts.epoch[:] = self._progress.class_counts
        if self._early_stop is not None and self._early_stop.reason is not None:
            self._progress.stopped = True  # more epochs end where they would have ended in one go
        self._exchange.resume(self._progress.step)

    def _compare_ranks(self) -> None:
        """Raise ConfigError on every rank unless all have the same versions, dataset, plan, model and step."""
        compare_runs(
            self._comm,
            {
                **versions(),
                "processor": processor(),
                "dataset": self._data.training.manifest.digest,
                "plan": self._plan.identity(),
                "model": model_identity(self._model, self._data.signature),
                "step": self._progress.step,
            },
        )
        for optimizer in (self._model.optimizer, *others_of(self._model)):
            compare_start(self._data_comm, self._epochs.share, optimizer, self._strategy.alike(self._model))

    def _train_epoch(self) -> None:
        epoch = self._plan.epoch_of_step(self._progress.step)
        self._epochs.train(epoch, self._progress.step, self._last_step(epoch), self._callbacks)
        row = reading_row(self._data.training.readers, self._context.world.rank, self._progress.step)
        self._context.control.notify("metrics", rows=[row])

    def _finish(self) -> list[str]:
        """End the training, and export the model. Returns the ids of samples that its epochs leave, on rank 0."""
        control, config, data = self._context.control, self._config, self._data
        self._strategy.end()
        self._checkpoints.finish(self._progress)
        self._clock.flush()
        self._strategy.finish()
        self._epochs.finalize()
        self._callbacks.end(self._progress.metrics)
        step = self._progress.step
        if (
            config.checkpoints.keep_best is not None
        ):  # after all that ends a run, such as averages that become the weights
            control.beat(step, "restore the best checkpoint")
            self._saver.restore_best()
        fisher = self._fisher(step)
        exported = whole_model(self._context, config, self._joined, data.signature)
        control.beat(step, "export")
        with pieces_for_first(config, self._model, self._comm):
            if self._reports is None:
                return []
            self._reports.flush()
            if exported is not None:
                more = {} if fisher is None else {FISHER_FILE: fisher}
                export_model(self._context, config, data.training, exported, data.signature, self._saver.staging, more)
        return self._epochs.left_over(step)

    def _fisher(self, step: int) -> bytes | None:
        """With --ewc, the file that says how much each weight of the trained model matters, by the rows of the dataset
        that was trained on: of a mixture the first one, the newest. A collective.
        """
        if self._config.model.ewc is None:
            return None
        training, comm = self._data.training, self._data_comm
        beats = Beats(self._context.control, step, "see how much each weight matters")
        rows = eval_batches(training.readers[0], training.encoder, comm.rank, comm.num_ranks, BATCH_ROWS)
        fisher = fisher_of(
            self._model, rows, self._config.data.seed, comm,
            logits=takes_logits(self._model), report=lambda number: beats(number, "batch"),
        )  # fmt: skip
        return stored_fisher(self._model, with_earlier(fisher, self._joined.earlier))

    def _samples_per_s(self, step: int) -> float | None:
        first, seconds = self._clock.steady()
        samples = self._epochs.samples(first, step) if first is not None else 0
        return round(samples / seconds, 3) if samples and seconds > 0 else None

    def _stopped_by(self) -> str | None:
        if self._progress.step >= self._plan.steps(self._config.data.epochs):
            return None
        if self._early_stop is not None and self._early_stop.reason is not None:
            return self._early_stop.reason
        return (
            "a callback of the model" if self._progress.stopped else f"--max-steps {self._config.validation.max_steps}"
        )

    def _watching(self) -> list[str]:
        """The model's own callbacks that choose by the validation."""
        if self._validation is None:
            return []
        named = ((type(callback).__name__, getattr(callback, "monitor", None)) for callback in self._joined.callbacks)
        return [f"{name} of {metric}" for name, metric in named if isinstance(metric, str) and of_validation(metric)]

    def _last_step(self, epoch: int) -> int:
        """The step after which the epoch ends in this run."""
        return min(self._plan.first_step(epoch + 1), self._steps)

    def _is_judged(self, epoch: int) -> bool:
        """Whether --early-stop judges the epoch that ends now, as it would without --max-steps."""
        config, last = self._config, self._progress.step == self._plan.steps(self._config.data.epochs)
        scheduled = (
            last
            or (epoch + 1) % config.validation.validate_every == 0
            or not of_validation(config.validation.early_stop)
        )
        return scheduled and not self._progress.cut

    # Called by RunCallbacks

    def epoch_begins(self, epoch: int) -> bool:
        """False if the epoch is resumed: then its metrics and class counts are restored too."""
        if self._progress.step == self._plan.first_step(epoch):
            self._counts.epoch[:] = 0
            return True
        self._saver.restore_metrics()
        return False

    def step_begins(self) -> None:
        """Start timing the step, and ask the others to leave or save after it if this rank is asked to."""
        if self._context.control.leaving.is_set():
            self._exchange.want("leave")
        if self._context.control.saving.is_set():
            self._context.control.saving.clear()
            self._checkpoints.ask()
        self._strategy.step_begins()
        self._clock.begins()

    def step_ends(self, epoch: int) -> None:
        """Make the reports, agreements and checkpoints that follow a step."""
        agreement = agreement_on(self._exchange, self._progress.step + 1)
        agreement = self._strategy.step_ends(agreement, epoch_ends=agreement.step == self._last_step(epoch))
        self._progress.step = agreement.step
        self._counts.step_ends(agreement.step)
        self._progress.class_counts = self._counts.epoch
        self._clock.ends(agreement.step)
        self._context.control.beat(agreement.step, "train")
        if self._reports is not None:
            for step, loss in losses_of(agreement):
                self._reports.step(step, epoch, loss, skipped=agreement.skipped)
        way = self._config.way
        self._epochs.forget(agreement.step - (way.delay if isinstance(way, Delay) else 0))
        if agreement.equal:
            self._weights.after(agreement.step)
        if self._model.stop_training:
            # A callback of one rank: all ranks must stop after the same step, so they agree first.
            self._model.stop_training, self._stop_wanted = False, True
            self._exchange.want("stop")
        if agreement.stop:
            self._model.stop_training = self._progress.stopped = True
        self._checkpoints.step_ends()
        # At the end of an epoch callbacks come first: a run that resumes there must not miss them.
        if agreement.step < self._last_step(epoch) and not agreement.stop:
            if agreement.leave and agreement.equal:
                self._leave(in_epoch=True)
            self._checkpoints.begin_if_due(agreement, self._progress, in_epoch=True)

    def _leave(self, *, in_epoch: bool) -> None:
        self._checkpoints.finish(self._progress, in_epoch=in_epoch)
        self._clock.flush()
        if self._reports is not None:
            self._reports.flush()
        raise _Left

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Metrics over all ranks, the same on each; after a validation also its metrics."""
        step = self._progress.step
        epochs = self._plan.epoch_of_step(step - 1) + 1
        self._progress.cut = step != self._plan.first_step(epochs)
        if self._progress.cut:
            self._own_metrics = [(one, one.numpy().copy()) for one in variables_of(self._model, METRICS)]
        sums = SoloCommunicator() if self._exchange.sums_metrics else self._data_comm
        metrics = of_all_ranks(self._model, sums, self._exchange.scale, logs)
        run_ends = step == self._steps or self._progress.stopped
        if self._validation is None or not (run_ends or epochs % self._config.validation.validate_every == 0):
            return metrics
        with self._clock.validation():
            self._strategy.complete()
            self._joined.to_score()  # with the weights of this step
            validated = self._validation.after(step)
        self._checkpoints.step_begins()
        self._validated = validated.row
        return metrics | validated.metrics

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Agree on stopping, report, and write a checkpoint if one is scheduled."""
        self._progress.metrics = as_floats(logs)
        leaving = self._context.control.leaving.is_set()
        words = np.array([self._model.stop_training or self._stop_wanted, leaving], np.uint8)
        self._comm.all_reduce(words, "max")
        self._progress.stopped = self._model.stop_training = bool(words[0])
        class_counts = self._counts.epoch_ends(self._data_comm)
        tables = {} if self._joined.tables is None else self._joined.tables.figures()
        if self._reports is not None:
            metrics = json_safe(self._progress.metrics)
            self._reports.epoch(self._progress.step, epoch, metrics, class_counts, self._validated, tables)
        self._validated = None
        for variable, value in self._own_metrics:
            variable.assign(value)  # in place of the sums over all ranks: the rest of the epoch adds to it
        self._own_metrics = []
        if (agreement := self._exchange.agreement) is None:
            return
        if self._goes_on and agreement.equal and (words[1] or agreement.leave):
            self._leave(in_epoch=False)
        self._checkpoints.epoch_ends(agreement, self._progress)
