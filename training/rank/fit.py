"""Runs the training in one rank: build, restore, `model.fit` epoch by epoch, checkpoints, export."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.batches.audit_log import AuditLog, sample_hex
from lockstep.training.batches.augmenting import augmentation_of, labels_of
from lockstep.training.batches.feed import Batch
from lockstep.training.batches.tf_dataset import FeedPipeline
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.comm.base import Communicator, SoloCommunicator
from lockstep.training.config import TrainConfig, lane_groups
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import RankResult, TrainOrder
from lockstep.training.control.protocol import OPENING, json_safe
from lockstep.training.embeddings.sharded_embedding import Tables, check_fits
from lockstep.training.exchange.agreement import Agreement, FedBatches, NonFinitePolicy
from lockstep.training.exchange.compare_ranks import WeightCheck, compare_runs, processor, versions
from lockstep.training.models.on_disk import export, load_initial, plain_model
from lockstep.training.plan.client_plan import RunPlan
from lockstep.training.plan.mixture import Plan, steps_asked
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.checkpointing import Checkpoints
from lockstep.training.rank.early_stop import EarlyStop
from lockstep.training.rank.metrics import StepClock, StepReports, reading_row
from lockstep.training.rank.prepare import JoinedModel, RankModel, agreement_on
from lockstep.training.rank.saver import Progress, Saver
from lockstep.training.rank.validation import Validation
from lockstep.training.reading.bad_records import BadRecords
from lockstep.training.reading.open import OpenSplit, verify_share
from lockstep.training.reading.reader import ReadOptions
from lockstep.training.rules import StopRule, of_validation
from lockstep.training.run.metrics import BAD_RECORD
from lockstep.training.run.paths import staged_model
from lockstep.training.steps.distribute_checks import compare_start
from lockstep.training.steps.model_state import (
    METRICS,
    WEIGHTS,
    as_floats,
    derive_seeds,
    model_identity,
    tensors_of,
    variables_of,
)
from lockstep.training.steps.other_optimizers import others_of
from lockstep.training.steps.own_fit import of_all_ranks, only_on_leader

log = logging.getLogger(__name__)


def compare_ranks(
    communicator: Communicator,
    data: TrainingSet,
    plan: RunPlan,
    model: keras.Model,
    signature: Signature,
    step: int,
) -> None:
    """Raise ConfigError on every rank unless all have the same versions, dataset, plan, model and step."""
    compare_runs(
        communicator,
        {
            **versions(),
            "processor": processor(),
            "dataset": data.manifest.digest,
            "plan": plan.identity(),
            "model": model_identity(model, signature),
            "step": step,
        },
    )


def export_model(
    context: RankContext, config: TrainConfig, data: TrainingSet, model: keras.Model, signature: Signature, staging: str
) -> None:
    """Upload the final model and have the driver publish it; only on rank 0."""
    files: list[dict[str, Any]] = export(model, staged_model(staging), config.datasets[0], data.manifest, signature)
    context.control.request("model", config.stall_limit_s, files=files)


def left_over_ids(data: TrainingSet, plan: Plan, step: int) -> list[str]:
    """The ids, in hex, of the samples that the epochs up to `step` leave; none if the last one was cut short."""
    epochs = plan.epoch_of_step(step - 1) + 1
    if step != plan.first_step(epochs):
        return []
    return [sample_hex(sample) for _, sample in data.left_over(plan, epochs)]


def losses_of(agreement: Agreement) -> list[tuple[int, float]]:
    """Each step that the ranks have agreed on now, and its loss; none for a step that a rank did by itself."""
    losses = (agreement.losses or (agreement.loss,)) if agreement.agreed else ()
    return list(enumerate(losses, agreement.step - len(losses) + 1))


class LabelCounts:
    """Counts the rows of each class in the steps of an epoch that are done; without a number of classes, those of 0 and
    of 1. Safe for two threads: one adds batches ahead of the steps.
    """

    def __init__(self, signature: Signature) -> None:
        self._classes = signature.num_classes
        self._lock = threading.Lock()
        self._ahead: dict[int, NDArray[np.float64]] = {}
        # Without classes the third counts other numbers. Float, since mixup makes shares of classes.
        self.epoch = np.zeros(self._classes or 3)
        """This rank's part (classes,), which a checkpoint within an epoch keeps."""

    def add(self, batch: int, labels: NDArray[Any] | None) -> None:
        """Labels (n,), or shares of classes (n, classes), of batch number `batch`, from 0."""
        if labels is None:
            return
        if self._classes is None:
            counts = np.array([(labels == 0).sum(), (labels == 1).sum(), ((labels != 0) & (labels != 1)).sum()], float)
        elif labels.ndim == 2:
            counts = labels.sum(axis=0, dtype=np.float64)
        else:
            counts = np.bincount(labels.astype(np.int64), minlength=self._classes).astype(np.float64)
        with self._lock:
            self._ahead[batch] = counts

    def step_ends(self, step: int) -> None:
        """Count the batches of optimizer step `step`, from 1, and of those before."""
        with self._lock:
            for batch in [batch for batch in self._ahead if batch < step]:
                self.epoch += self._ahead.pop(batch)

    def of_all_ranks(self, communicator: Communicator) -> list[int] | None:
        """Rows of each class in this epoch so far; None if labels are not classes. A collective."""
        counts = self.epoch.copy()
        communicator.all_reduce(counts)
        if self._classes is None:
            if counts[2] or not counts.any():
                return None
            counts = counts[:2]
        return [round(float(count)) for count in counts]


class _Left(Exception):
    """All ranks have written a checkpoint and end here, in the middle of Keras' `fit`."""


class Fit(AbstractContextManager["Fit"]):
    """One rank's part of a run. Every rank makes the same calls in the same order."""

    def __init__(self, context: RankContext, config: TrainConfig) -> None:
        self._context, self._config, world = context, config, context.world
        self._order = TrainOrder.from_json(context.payload)
        context.control.beat(0, OPENING)
        self._split = TrainingSet.at(config.datasets, config.split, config.mix, ReadOptions.of(config, world.num_ranks))
        if config.on_bad_record == "skip":
            self._split = self._split.skipping_bad_records(self._report_bad_records)
        elif config.bad_images == "skip":
            self._split = self._split.skipping_bad_images()
        held_out = None
        if config.validate is not None:
            held_out = OpenSplit.at(config.datasets, config.validate, options=ReadOptions.of(config, world.num_ranks))
            if config.on_bad_record == "skip":
                held_out.leave_out_bad_records()
        if config.verify == "full":
            readers = [*self._split.readers, *([held_out.reader] if held_out else [])]
            verify_share(readers, world.rank, world.num_ranks, partial(context.control.beat, 0))
        self._signature = labels_of(config, self._split.encoder.signature)
        self._audit: AuditLog | None = None
        self._plan, self._rank_model = self._set_up()
        self._steps = steps_asked(self._plan, config.epochs, config.max_steps)
        self._model, self._exchange = self._rank_model.model, self._rank_model.exchange
        self._strategy = self._rank_model.strategy
        self._comm = self._strategy.communicator
        per_epoch = max(1, self._plan.total // self._plan.global_batch)
        callbacks = [only_on_leader(callback, world.rank) for callback in self._rank_model.callbacks]
        self._early_stop: EarlyStop | None = None
        if config.early_stop is not None:
            self._early_stop = EarlyStop(StopRule.parse(config.early_stop), self._is_judged)
            callbacks.append(self._early_stop)
        self._callbacks = RunCallbacks(
            callbacks,
            self._model,
            self,
            epochs=config.epochs,
            steps=per_epoch,
            micro_batches=config.micro_batches,
        )
        self._reports = StepReports(context.control) if world.is_leader else None
        if self._reports is not None and self._rank_model.learning_rate is not None:
            self._reports.learning_rate(self._rank_model.learning_rate.to_json())
        self._clock = StepClock(context.control, world.rank, self._exchange, num_ranks=world.num_ranks)
        self._tables = self._rank_model.tables
        self._saver = Saver(
            context,
            config,
            self._model,
            self._comm,
            [callback for callback in self._callbacks.callbacks if callback is not self._early_stop],
            self._early_stop,
            self._audit,
            self._exchange,
            self._strategy,
            self._tables,
        )
        self._validation: Validation | None = None
        if held_out is not None:
            self._validation = Validation(
                held_out,
                config,
                self._rank_model.to_score(),
                self._comm,
                context.control,
                self._callbacks,
                self._tables,
            )
        self._validated: dict[str, Any] | None = None  # at the end of this epoch
        self._own_metrics: list[tuple[Any, Any]] = []  # variables and values of this rank, at the end of a cut epoch
        self._progress = Progress(step=0, stopped=False, metrics={})
        self._stop_wanted = False
        self._labels = LabelCounts(self._signature)
        self._class_counts: list[int] | None = None  # of the last epoch
        self._weights = WeightCheck(self._comm, self._model.weights)
        self._checkpoints = Checkpoints(
            self._saver, self._exchange, context.control, config, self._clock, self._weights, self._reports
        )

    def _set_up(self) -> tuple[RunPlan, JoinedModel]:
        """The plan, and the model that trains by it; also sets the audit, and what `_fit_epoch` needs."""
        context, config = self._context, self._config
        plan = self._split.plan(self._order.plan)
        self._augmentation = augmentation_of(config, plan, self._split.encoder.signature)
        groups, shares = lane_groups(config), self._order.shares
        self._feed = self._split.feed(plan, context.world, groups=groups, shares=shares)
        self._feed.watch(context.control.reads, self._report_bad_image)
        if config.audit:
            self._audit = self._split.audit_log(plan, self._feed.rows)
        self._fed = FedBatches(self._feed.lanes.start, plan.global_batch // plan.lanes)
        non_finite = NonFinitePolicy(config.non_finite == "skip", self._fed, self._report_non_finite)
        self._lane_plan = plan
        # One for all epochs: while the last steps of one are made, and its validation, the next one is read ahead.
        steps = steps_asked(plan, config.epochs, config.max_steps)
        self._pipeline = FeedPipeline(self._feed, 0, steps, self._batch_is_ready, self._augmentation)
        rows, metric = self._feed.rows, self._order.metric
        self._sums_model = RankModel(context, config, plan, self._signature, rows, non_finite, metric)
        return plan, self._sums_model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._rank_model.abort(error)
            self._checkpoints.abandon(error)
        self._rank_model.close()

    def run(self) -> dict[str, Any]:
        """Train the rest of the run; returns the rank's result."""
        control, plan, model = self._context.control, self._plan, self._model
        self._rank_model.install_step()
        control.beat(0, "restore")
        restored = self._saver.find()
        self._callbacks.begin()
        if restored is None:
            if (first_weights := self._order.first_weights) is not None:
                load_initial(model, first_weights)
            if self._comm.num_ranks > 1:
                derive_seeds(model, self._config.seed, 0, self._comm.rank)
        else:
            self._progress = self._saver.restore(restored)
            if self._progress.class_counts is not None:
                self._labels.epoch[:] = self._progress.class_counts
            if self._early_stop is not None and self._early_stop.reason is not None:
                self._progress.stopped = True  # more epochs end where they would have ended in one go
            self._exchange.resume(self._progress.step)
        del restored  # the whole checkpoint
        control.beat(self._progress.step, "compare with the other ranks")
        compare_ranks(self._comm, self._split, plan, model, self._signature, self._progress.step)
        for optimizer in (model.optimizer, *others_of(model)):
            compare_start(self._comm, self._share, optimizer, model.weights)
        if self._progress.step < self._steps and not self._progress.stopped:
            self._rank_model.check_rows(self._next_batch)
        self._saver.make_ready()
        began_at, began = self._progress.step, time.perf_counter()
        control.beat(began_at, "train")
        try:
            while self._progress.step < self._steps and not self._progress.stopped:
                self._fit_epoch(plan.epoch_of_step(self._progress.step))
        except _Left:
            return RankResult(steps=self._progress.step, left=True).to_json()
        finally:
            self._end_reading()
        validation_s = 0.0 if self._validation is None else self._validation.seconds
        seconds = time.perf_counter() - began - validation_s
        self._strategy.end()
        self._checkpoints.finish(self._progress)
        self._clock.flush()
        self._strategy.finish()
        self._finalize()
        self._callbacks.end(self._progress.metrics)
        step, left_over = self._progress.step, []
        if self._config.keep_best is not None:  # after all that ends a run, such as averages that become the weights
            control.beat(step, "restore the best checkpoint")
            self._saver.restore_best()
        exported = model if self._tables is None else self._plain(self._tables)
        if self._reports is not None:
            self._reports.flush()
            control.beat(step, "export")
            if exported is not None:
                export_model(self._context, self._config, self._split, exported, self._signature, self._saver.staging)
            left_over = self._left_over(step)
        return RankResult(
            steps=step,
            metrics=json_safe(self._progress.metrics),
            samples=self._samples(began_at, step),
            seconds=seconds,
            first_step_s=self._clock.first_step_s(began),
            samples_per_s=self._samples_per_s(step),
            validation_s=validation_s,
            stopped_by=self._stopped_by(),
            watching=self._watching(),
            left_over=left_over,
            class_counts=self._class_counts,
        ).to_json()

    # What depends on how ranks read

    @property
    def _share(self) -> float:
        """This rank's part of the rows of a step."""
        return self._feed.rows / self._plan.global_batch

    def _next_batch(self) -> Any:
        """This rank's rows of the next step, as of Keras' fit."""
        step = self._progress.step
        with FeedPipeline(self._feed, step, step + 1, None, self._augmentation) as pipeline:
            return next(iter(pipeline.dataset))

    def _end_reading(self) -> None:
        self._pipeline.close()

    def _finalize(self) -> None:
        self._rank_model.finalize()

    def _samples(self, first: int, last: int) -> int:
        """Samples that all ranks trained on in steps first + 1 to last."""
        return (last - first) * self._plan.global_batch

    def _samples_per_s(self, step: int) -> float | None:
        first, seconds = self._clock.steady()
        samples = self._samples(first, step) if first is not None else 0
        return round(samples / seconds, 3) if samples and seconds > 0 else None

    def _left_over(self, step: int) -> list[str]:
        return left_over_ids(self._split, self._lane_plan, step)

    def _plain(self, tables: Tables) -> keras.Model | None:
        """Return the model with Embedding layers on rank 0, unless it does not fit there; else None. A collective."""
        self._context.control.beat(self._progress.step, "gather the tables")
        unfit = np.zeros(1, np.uint8)
        specs, _ = tables.state()
        if self._context.world.is_leader:
            try:
                check_fits(specs, "the tables of the trained model")
            except ConfigError as error:
                log.warning("the run ends with a checkpoint and no exported model: %s", error)
                unfit[0] = 1
        self._comm.broadcast(unfit)
        if unfit[0] or (whole := tables.whole()) is None:
            return None
        tensors = tensors_of(self._model, WEIGHTS) | whole
        plain = plain_model(self._config, self._signature, tensors, "the trained model")
        plain.optimizer.build(plain.trainable_variables)  # Keras warns when it loads one that was saved unbuilt
        return plain

    def _stopped_by(self) -> str | None:
        if self._progress.step >= self._plan.steps(self._config.epochs):
            return None
        if self._early_stop is not None and self._early_stop.reason is not None:
            return self._early_stop.reason
        return "a callback of the model" if self._progress.stopped else f"--max-steps {self._config.max_steps}"

    def _watching(self) -> list[str]:
        """The model's own callbacks that choose by the validation."""
        if self._validation is None:
            return []
        named = (
            (type(callback).__name__, getattr(callback, "monitor", None)) for callback in self._rank_model.callbacks
        )
        return [f"{name} of {metric}" for name, metric in named if isinstance(metric, str) and of_validation(metric)]

    def _last_step(self, epoch: int) -> int:
        """The step after which the epoch ends in this run."""
        return min(self._plan.first_step(epoch + 1), self._steps)

    def _is_judged(self, epoch: int) -> bool:
        """Whether --early-stop judges the epoch that ends now, as it would without --max-steps."""
        config, last = self._config, self._progress.step == self._plan.steps(self._config.epochs)
        scheduled = last or (epoch + 1) % config.validate_every == 0 or not of_validation(config.early_stop)
        return scheduled and not self._progress.cut

    def _fit_epoch(self, epoch: int) -> None:
        step, last = self._progress.step, self._last_step(epoch)
        self._strategy.begin_epoch(epoch, last)
        self._callbacks.starts_at(step - self._plan.first_step(epoch))
        batches = self._pipeline.part(step, last)
        self._sums_model.fit(batches, last - step, self._callbacks, epoch=epoch, pipeline=self._pipeline)
        self._context.control.notify(
            "metrics", rows=[reading_row(self._split.readers, self._context.world.rank, self._progress.step)]
        )

    # Called by RunCallbacks

    def epoch_begins(self, epoch: int) -> bool:
        """False if the epoch is resumed: then its metrics and class counts are restored too."""
        if self._progress.step == self._plan.first_step(epoch):
            self._labels.epoch[:] = 0
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
        self._labels.step_ends(agreement.step)
        self._progress.class_counts = self._labels.epoch
        self._clock.ends(agreement.step)
        self._context.control.beat(agreement.step, "train")
        if self._reports is not None:
            for step, loss in losses_of(agreement):
                self._reports.step(step, epoch, loss, skipped=agreement.skipped)
        self._forget(agreement.step - self._config.delay)
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
        sums = SoloCommunicator() if self._exchange.sums_metrics else self._comm
        metrics = of_all_ranks(self._model, sums, self._exchange.scale, logs)
        run_ends = step == self._steps or self._progress.stopped
        if self._validation is None or not (run_ends or epochs % self._config.validate_every == 0):
            return metrics
        with self._clock.validation():
            self._rank_model.to_score()  # with the weights of this step
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
        self._class_counts = self._labels.of_all_ranks(self._comm)
        tables = {} if self._tables is None else self._tables.figures()
        if self._reports is not None:
            metrics = json_safe(self._progress.metrics)
            self._reports.epoch(self._progress.step, epoch, metrics, self._class_counts, self._validated, tables)
        self._validated = None
        for variable, value in self._own_metrics:
            variable.assign(value)  # in place of the sums over all ranks: the rest of the epoch adds to it
        self._own_metrics = []
        if (agreement := self._exchange.agreement) is None:
            return
        goes_on = self._progress.step < self._steps and not self._progress.stopped
        if goes_on and agreement.equal and (words[1] or agreement.leave):
            self._leave(in_epoch=False)
        self._checkpoints.epoch_ends(agreement, self._progress)

    def _forget(self, step: int) -> None:
        """Steps up to `step` need no names of samples any more."""
        self._fed.forget(step)

    def _report_non_finite(self, row: dict[str, Any]) -> None:
        self._context.control.notify("metrics", rows=[row])

    def _report_bad_image(self, words: str) -> None:
        self._report_bad({"what": words})

    def _report_bad_records(self, bad: BadRecords) -> None:
        self._report_bad(bad.to_row())

    def _report_bad(self, row: dict[str, Any]) -> None:
        print(f"weight 0: {row['what']}", flush=True)
        head = {"kind": BAD_RECORD, "step": self._progress.step, "rank": self._context.world.rank}
        self._context.control.notify("metrics", rows=[head | row])

    def _batch_is_ready(self, batch: Batch) -> None:
        """Note that a batch is ready; the TensorFlow thread that reads ahead calls this."""
        self._clock.batch_is_ready(batch.step)
        self._fed.add(batch.step, batch.sample_ids)
        if batch.step == self._order.suspect:
            samples = self._fed.of_step(batch.step + 1)["samples"]
            self._context.control.notify("suspect", step=batch.step, samples=samples)
        self._labels.add(batch.step, batch.y)
        if self._audit is not None:
            self._audit.add(batch)
