"""Reads the epochs of a run by its epoch plan, and trains on them with Keras' `fit`."""

from __future__ import annotations

from typing import Any

from lockstep.training.batches.audit_log import AuditLog, sample_hex
from lockstep.training.batches.augmenting import augmentation_of
from lockstep.training.batches.feed import Batch
from lockstep.training.batches.tf_dataset import FeedPipeline
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.control.messages import Suspect
from lockstep.training.exchange.agreement import FedBatches, NonFinitePolicy
from lockstep.training.plan.mixture import steps_asked
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.class_counts import ClassCounts
from lockstep.training.rank.metrics import StepClock
from lockstep.training.rank.opening import RankData, report_bad
from lockstep.training.rank.prepare import RankModel
from lockstep.training.ways import Tasks
from lockstep.training.world import World


class PlannedEpochs:
    """The epochs of one rank, whose batches are its lanes' part of each global batch."""

    def __init__(self, context: RankContext, config: TrainConfig, data: RankData, counts: ClassCounts) -> None:
        self._context, self._data, self._counts = context, data, counts
        self.plan = plan = data.training.plan(data.order.plan)
        self._steps = steps_asked(plan, config.data.epochs, config.validation.max_steps)
        self._augmentation = augmentation_of(config, plan, data.training.encoder.signature)
        groups, shares = config.step.lane_groups, data.order.shares
        grid = config.way.grid(config.ranks.num_ranks)
        if isinstance(config.way, Tasks):
            mine, each = config.way.task_of(config, context.world.rank)
            of_task = World.local(context.world.rank % each, each)
            self._feed = data.training.feed(plan, of_task, groups=groups, task=mine)
        else:
            self._feed = data.training.feed(plan, grid.data_world(context.world), groups=groups, shares=shares)
        self._feed.watch(context.control.reads, lambda words: report_bad(context, {"what": words}))
        audits = config.exactness.audit and grid.counts(context.world.rank)
        self.audit: AuditLog | None = data.training.audit_log(plan, self._feed.rows) if audits else None
        self._fed = FedBatches(self._feed.lanes.start, self._feed.plan.global_batch // plan.lanes)
        non_finite = NonFinitePolicy(config.exactness.non_finite == "skip", self._fed, self._report_non_finite)
        self.joined = RankModel(context, config, plan, data.signature, self._feed.rows, non_finite, data.order.metric)
        self.share = self._feed.rows / plan.global_batch

    def begin(self, clock: StepClock) -> None:
        """Give the model its step, and prepare to read."""
        self._clock = clock
        # One for all epochs: while the last steps of one are made, and its validation, the next one is read ahead.
        self._pipeline = FeedPipeline(self._feed, 0, self._steps, self._batch_is_ready, self._augmentation)
        self.joined.install_step()

    def check(self, step: int) -> None:
        """Raise ConfigError if ranks would train another model than one rank, by the batch of the step that follows
        `step`.
        """

        def next_batch() -> Any:
            with FeedPipeline(self._feed, step, step + 1, None, self._augmentation) as pipeline:
                try:
                    return next(iter(pipeline.dataset))
                except Exception as error:  # TensorFlow repeats only the text of what Python code raised
                    raise (pipeline.failure or error) from None

        self.joined.check_rows(next_batch)

    def train(self, epoch: int, first: int, last: int, callbacks: RunCallbacks) -> None:
        """Train steps first..last-1, which are of one epoch."""
        self.joined.strategy.begin_epoch(epoch, last)
        callbacks.starts_at(first - self.plan.first_step(epoch))
        batches = self._pipeline.part(first, last)
        self.joined.fit(batches, last - first, callbacks, epoch=epoch, pipeline=self._pipeline)

    def forget(self, step: int) -> None:
        """Drop the names of samples of steps up to `step`: no error names them any more."""
        self._fed.forget(step)

    def end(self) -> None:
        """End all reading."""
        self._pipeline.close()

    def finalize(self) -> None:
        """Do what Keras' `fit` does last: with `use_ema`, the averages become the weights."""
        self.joined.finalize()

    def samples(self, first: int, last: int) -> int:
        """Samples that all ranks train on in steps first..last-1."""
        return (last - first) * self.plan.global_batch

    def left_over(self, step: int) -> list[str]:
        """The ids, in hex, of the samples that the epochs up to `step` leave; none if the last one was cut short."""
        epochs = self.plan.epoch_of_step(step - 1) + 1
        if step != self.plan.first_step(epochs):
            return []
        return [sample_hex(sample) for _, sample in self._data.training.left_over(self.plan, epochs)]

    def _report_non_finite(self, row: dict[str, Any]) -> None:
        self._context.control.notify("metrics", rows=[row])

    def _batch_is_ready(self, batch: Batch) -> None:
        """Note that a batch is ready; the TensorFlow thread that reads ahead calls this."""
        self._clock.batch_is_ready(batch.step)
        self._fed.add(batch.step, batch.sample_ids)
        if batch.step == self._data.order.suspect:
            samples = self._fed.of_step(batch.step + 1)["samples"]
            self._context.control.notify("suspect", **Suspect(step=batch.step, samples=samples).to_json())
        self._counts.add(batch.step, batch.y)
        if self.audit is not None:
            self.audit.add(batch)
