"""The run inside one rank: build, restore, `model.fit` epoch by epoch, checkpoints, export."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import LockstepError
from training.batches.audit_log import sample_hex
from training.batches.augmenting import augmentation_of, labels_of
from training.batches.feed import Batch
from training.batches.tf_dataset import FeedPipeline, to_device
from training.batches.training_set import TrainingSet
from training.comm.base import Communicator
from training.config import TrainConfig, lane_groups
from training.control.context import RankContext
from training.control.protocol import OPENING, json_safe
from training.exchange.agreement import FedBatches
from training.exchange.compare_ranks import WeightCheck, compare_runs, processor, versions
from training.models.on_disk import export, load_initial
from training.plan.mixture import Plan
from training.rank.callbacks import RunCallbacks
from training.rank.checkpointing import Checkpoints
from training.rank.memory import arena_bytes, reckoned_bytes, resident_bytes
from training.rank.metrics import StepClock, StepReports, reading_row
from training.rank.prepare import distributed, prepare, split
from training.rank.saver import Progress, Saver
from training.reading.open import verify_share
from training.reading.reader import ReadOptions
from training.run.paths import staged_model
from training.steps.distribute import exchange_of, finalize
from training.steps.distribute_checks import settings_of
from training.steps.model_state import as_floats, derive_seeds, model_identity, weights_digest
from training.steps.own_fit import of_all_ranks, only_on_leader


def compare_ranks(
    communicator: Communicator,
    data: TrainingSet,
    plan: Plan,
    model: keras.Model,
    signature: Signature,
    step: int,
) -> None:
    """Raise ConfigError, on every rank alike, unless all ranks run the same on the same."""
    compare_runs(
        communicator,
        {
            **versions(),
            "processor": processor(),
            "dataset": data.manifest.digest,
            "plan": plan.identity(),
            "model": model_identity(model, signature),
            "optimizer": settings_of(model.optimizer),
            "weights": weights_digest(model),
            "step": step,
        },
    )


def export_model(
    context: RankContext, config: TrainConfig, data: TrainingSet, model: keras.Model, signature: Signature, staging: str
) -> None:
    """Upload the final model and have the driver publish it; rank 0 alone."""
    files: list[dict[str, Any]] = export(model, staged_model(staging), config.datasets[0], data.manifest, signature)
    context.control.request("model", config.stall_limit_s, files=files)


def left_over_ids(data: TrainingSet, plan: Plan, step: int) -> list[str]:
    """The samples, in hex, that the epochs up to `step` have left over; none where the last one was cut short."""
    epochs = plan.epoch_of_step(step - 1) + 1
    if step != plan.first_step(epochs):
        return []
    return [sample_hex(sample) for _, sample in data.left_over(plan, epochs)]


class LabelCounts:
    """Rows of each class since the last `taken`; of labels without a number of classes those of 0 and of 1."""

    def __init__(self, signature: Signature) -> None:
        self._classes = signature.num_classes
        # Without classes the third is of other numbers. Float, since mixup makes shares of classes.
        self._counts = np.zeros(self._classes or 3)

    def add(self, labels: NDArray[Any] | None) -> None:
        """Labels (n,), or shares of classes (n, classes)."""
        if labels is None:
            return
        if self._classes is None:
            self._counts += [(labels == 0).sum(), (labels == 1).sum(), ((labels != 0) & (labels != 1)).sum()]
        elif labels.ndim == 2:
            self._counts += labels.sum(axis=0)
        else:
            self._counts += np.bincount(labels.astype(np.int64), minlength=self._classes)

    def taken(self, communicator: Communicator) -> list[int] | None:
        """Rows of each class on all ranks, which begin again at 0; None of labels that are no classes. A collective."""
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        communicator.all_reduce(counts)
        if self._classes is None:
            if counts[2] or not counts.any():
                return None
            counts = counts[:2]
        return [round(float(count)) for count in counts]


class Fit(AbstractContextManager["Fit"]):
    """One rank's part of a run. Every rank makes the same calls in the same order."""

    def __init__(self, context: RankContext, config: TrainConfig) -> None:
        self._context, self._config, world = context, config, context.world
        context.control.beat(0, OPENING)
        self._split = TrainingSet.at(config.datasets, config.split, config.mix, ReadOptions.of(config, world.num_ranks))
        if config.bad_images == "skip":
            self._split = self._split.skipping_bad_images()
        if config.verify == "full":
            verify_share(self._split.readers, world.rank, world.num_ranks, lambda phase: context.control.beat(0, phase))
        self._plan = self._split.plan(context.payload["plan"])
        self._augmentation = augmentation_of(config, self._plan, self._split.encoder.signature)
        self._signature = labels_of(config, self._split.encoder.signature)
        groups = lane_groups(config)
        self._feed = self._split.feed(self._plan, world, groups=groups)
        self._steps = self._plan.steps(config.epochs)
        context.control.beat(0, "build the model")
        before_bytes = resident_bytes()
        prepared = prepare(config, self._plan, self._signature, self._feed.rows, groups)
        self._model = prepared.model
        if world.is_leader and not tf.config.list_physical_devices("GPU"):  # whose models are in memory of their own
            needed = reckoned_bytes(before_bytes, self._model, world.num_ranks)
            context.control.request("memory", config.stall_limit_s, rank_mib=needed >> 20)
        context.control.beat(0, "join the ranks")
        self._comm = context.communicator(arena_bytes=arena_bytes(self._model))
        self._comm.deadline_s = config.stall_limit_s
        self._step = distributed(config, self._plan, prepared, self._comm, self._feed.rows, groups)
        self._exchange = exchange_of(self._model.optimizer)
        # With a scaled loss the optimizer skips by itself what the scale has made too large.
        self._exchange.skips_any = config.non_finite == "skip" and not self._exchange.skips_non_finite
        self._fed = FedBatches(self._feed.lanes.start, self._plan.global_batch // self._plan.lanes)
        self._exchange.inquiry.fed = self._fed
        self._exchange.inquiry.report = lambda row: context.control.notify("metrics", rows=[row])
        per_epoch = max(1, self._plan.total // self._plan.global_batch)
        callbacks = [only_on_leader(callback, world.rank) for callback in prepared.callbacks]
        self._callbacks = RunCallbacks(
            callbacks,
            self._model,
            self,
            epochs=config.epochs,
            steps=per_epoch,
            micro_batches=config.micro_batches,
        )
        self._audit = self._split.audit_log(self._plan, self._feed.rows) if config.audit else None
        self._reports = StepReports(context.control) if world.is_leader else None
        if self._reports is not None and prepared.learning_rate is not None:
            self._reports.learning_rate(prepared.learning_rate.to_json())
        self._clock = StepClock(context.control, world.rank, lambda: self._exchange.waited_s)
        self._saver = Saver(context, config, self._model, self._comm, self._callbacks.callbacks, self._audit)
        self._progress = Progress(step=0, stopped=False, metrics={})
        self._stop_wanted = False
        self._labels = LabelCounts(self._signature)
        self._class_counts: list[int] | None = None  # of the last epoch
        self._weights = WeightCheck(self._comm, self._model.weights, config.compare_every)
        self._checkpoints = Checkpoints(
            self._saver, self._exchange, context.control, config, self._clock, self._weights, self._reports
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the exchange's thread may wait for ranks that will never come
            self._comm.abort(str(error))
            self._checkpoints.abandon(error)
        self._exchange.close()

    def run(self) -> dict[str, Any]:
        """Train what is left of the run; returns the rank's result."""
        control, plan, model = self._context.control, self._plan, self._model
        group = self._comm.group(range(self._comm.num_ranks))
        group.deadline_s = self._config.stall_limit_s
        self._step.install(model, group)
        control.beat(0, "restore")
        restored = self._saver.find()
        self._callbacks.begin()
        if restored is None:
            if (first_weights := self._context.payload["first_weights"]) is not None:
                load_initial(model, first_weights)
            if self._comm.num_ranks > 1:
                derive_seeds(model, self._config.seed, 0, self._comm.rank)
        else:
            self._progress = self._saver.restore(restored)
            self._exchange.step = self._progress.step
        del restored  # it holds the whole checkpoint
        control.beat(self._progress.step, "compare with the other ranks")
        compare_ranks(self._comm, self._split, plan, model, self._signature, self._progress.step)
        self._saver.make_ready()
        began_at, began = self._progress.step, time.monotonic()
        control.beat(began_at, "train")
        while self._progress.step < self._steps and not self._progress.stopped:
            self._fit_epoch(plan.epoch_of_step(self._progress.step))
        seconds = time.monotonic() - began
        self._checkpoints.finish(self._progress)
        self._clock.flush()
        finalize(model.optimizer, model.trainable_variables)
        self._callbacks.end(self._progress.metrics)
        step, left_over = self._progress.step, []
        if self._reports is not None:
            self._reports.flush()
            control.beat(step, "export")
            export_model(self._context, self._config, self._split, model, self._signature, self._saver.staging)
            left_over = left_over_ids(self._split, plan, step)
        return {
            "steps": step,
            "epochs": plan.epoch_of_step(step - 1) + 1,
            "metrics": json_safe(self._progress.metrics),
            "samples": (step - began_at) * plan.global_batch,
            "seconds": seconds,
            "left_over": left_over,
            "class_counts": self._class_counts,
        }

    def _fit_epoch(self, epoch: int) -> None:
        step, last = self._progress.step, self._plan.first_step(epoch + 1)
        self._callbacks.starts_at(step - self._plan.first_step(epoch))
        with FeedPipeline(self._feed, step, last, self._batch_is_ready, self._augmentation) as pipeline:
            # Keras begins a dataset of known length anew at the end of an epoch, which would read it twice.
            dataset = split(pipeline.dataset, self._config.micro_batches)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
            dataset = to_device(dataset)
            try:
                self._model.fit(
                    dataset,
                    initial_epoch=epoch,
                    epochs=epoch + 1,
                    steps_per_epoch=(last - step) * self._config.micro_batches,
                    callbacks=self._callbacks,
                    verbose=0,
                    shuffle=False,
                )
            except Exception as error:
                # TensorFlow repeats the text of an exception in Python code, not the exception.
                cause = self._exchange.fault() or self._step.error or pipeline.failure or error
                if cause is error:
                    raise
                raise cause from None
        self._context.control.notify(
            "metrics", rows=[reading_row(self._split.readers, self._context.world.rank, self._progress.step)]
        )

    # What RunCallbacks tells

    def epoch_begins(self, epoch: int) -> bool:
        """Where the epoch goes on, its metrics do too."""
        if self._progress.step == self._plan.first_step(epoch):
            return True
        self._saver.restore_metrics()
        return False

    def step_begins(self) -> None:
        """The step's time runs."""
        self._clock.begins()

    def step_ends(self, epoch: int) -> None:
        """Reports, agreements and checkpoints of a step."""
        agreement = self._exchange.agreement
        if agreement is None or agreement.step != self._progress.step + 1:
            raise LockstepError(
                f"step {self._progress.step + 1} was not exchanged between the ranks",
                got="a train_step that does not call optimizer.apply_gradients once",
                allowed="one call a step",
                next_step="Call self.optimizer.apply_gradients or apply once in the model's train_step.",
            )
        self._progress.step = agreement.step
        self._clock.ends(agreement.step)
        self._context.control.beat(agreement.step, "train")
        if self._reports is not None:
            self._reports.step(agreement.step, epoch, agreement.loss, skipped=agreement.skipped)
        self._fed.forget(agreement.step)
        self._weights.after(agreement.step)
        if self._model.stop_training:
            # One rank's callback: all must stop after the same step, so they are asked first.
            self._model.stop_training, self._stop_wanted = False, True
            self._exchange.want("stop")
        if agreement.stop:
            self._model.stop_training = self._progress.stopped = True
        self._checkpoints.step_ends()
        # At the end of an epoch callbacks come first: a run that goes on from there must not miss them.
        if agreement.step < self._plan.first_step(epoch + 1) and not agreement.stop:
            self._checkpoints.begin_if_due(agreement, self._progress, in_epoch=True)

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Metrics over all ranks, the same on each."""
        return of_all_ranks(self._model, self._comm, self._exchange.scale, logs)

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Agree on stopping, report, and write the checkpoint that is due."""
        self._progress.metrics = as_floats(logs)
        stop = np.array([self._model.stop_training or self._stop_wanted], np.uint8)
        self._comm.all_reduce(stop, "max")
        self._progress.stopped = self._model.stop_training = bool(stop[0])
        self._class_counts = self._labels.taken(self._comm)
        if self._reports is not None:
            self._reports.epoch(self._progress.step, epoch, json_safe(self._progress.metrics), self._class_counts)
        if self._exchange.agreement is not None:
            self._checkpoints.epoch_ends(self._exchange.agreement, self._progress)

    def _batch_is_ready(self, batch: Batch) -> None:
        """Called by TensorFlow's thread that reads ahead."""
        self._clock.batch_is_ready(batch.step)
        self._fed.add(batch.step, batch.sample_ids)
        self._labels.add(batch.y)
        if self._audit is not None:
            self._audit.add(batch)
