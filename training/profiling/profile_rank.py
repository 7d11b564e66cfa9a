"""A rank's part of jobs.profile_run: one compiled step, fed in turn with three kinds of data, and the input alone."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from training.batches.augmenting import augmentation_of, labels_of
from training.batches.tf_dataset import PREFETCH_BATCHES, FeedPipeline, to_device
from training.batches.training_set import Feed
from training.config import TrainConfig
from training.control.context import RankContext
from training.control.protocol import OPENING
from training.plan.planning import lane_groups
from training.profiling.profile_data import ProfileData
from training.profiling.profile_loop import ProfileLoop
from training.profiling.verdict import CACHED, CACHED_ALONE, COLD, COLD_ALONE, SYNTHETIC
from training.rank.memory import arena_bytes
from training.rank.prepare import prepare, split
from training.rank.run_step import distributed
from training.run.rank_file import HostBuffer
from training.steps import model_state
from training.steps.distribute import exchange_of

# A batch that no reading ahead reaches: what is measured lies amid the reading, not at its end.
_NO_END = 1 << 40
_CHUNKS = 2  # so many at least are measured at a time: the batches of one are there at once
_LEAST_STEPS, _MOST_STEPS = 16, 512
_COPIES = 3
# Until the batches that lie ready when the first step begins are used, and the feed has gone over to one after another.
_SETTLING_STEPS = PREFETCH_BATCHES + 2


class ProfileRank(AbstractContextManager["ProfileRank"]):
    """Every rank makes the same calls in the same order."""

    def __init__(self, context: RankContext, config: TrainConfig) -> None:
        self._context, self._config = context, config
        with ExitStack() as stack:
            context.control.beat(0, OPENING)
            self._data = stack.enter_context(ProfileData(config, context.world, context.payload["plan"]))
            plan, rows, groups = self._data.plan, self._data.near.rows, lane_groups(config)
            self._augmentation = augmentation_of(config, plan, self._data.signature)
            context.control.beat(0, "build the model")
            prepared = prepare(config, plan, labels_of(config, self._data.signature), rows, groups)
            self._model = prepared.model
            context.control.beat(0, "join the ranks")
            self._comm = context.communicator(arena_bytes=arena_bytes(self._model))
            self._comm.deadline_s = config.stall_limit_s
            self._step = distributed(config, plan, prepared, self._comm, rows, groups)
            self._exchange = exchange_of(self._model.optimizer)
            self._exchange.skips_any = config.non_finite == "skip" and not self._exchange.skips_non_finite
            stack.callback(self._exchange.close)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # the exchange's thread may wait for ranks that will never come
            self._comm.abort(str(error))
        self._stack.close()

    def run(self) -> dict[str, Any]:
        """Measure. Returns {rounds: [{kind: {seconds, steps, cpu_s, ...}}], steps, settling, chunk_steps, local,
        repeats, cores, ranks_of_host, state_bytes, copy_s}.
        """
        control, payload, plan = self._context.control, self._context.payload, self._data.plan
        group = self._comm.group(range(self._comm.num_ranks))
        group.deadline_s = self._config.stall_limit_s
        self._step.install(self._model, group)
        if self._comm.num_ranks > 1:
            model_state.derive_seeds(self._model, self._config.seed, 0, self._comm.rank)
        chunk = self._largest(self._data.near.chunk_steps)
        self._steps = int(payload["steps"] or min(max(_CHUNKS * chunk, _LEAST_STEPS), _MOST_STEPS))
        self._settling = min(chunk, self._steps) + _SETTLING_STEPS  # of steps that are fed; the kept batch is there
        rounds = int(payload["rounds"]) + 1
        # Cold batches lie far apart in the epoch, so that no block is in two of their places.
        kind_steps, epoch_steps = self._settling + self._steps, plan.total // plan.global_batch
        self._stride = self._cold_place = max(kind_steps, epoch_steps // (2 * rounds + 1))
        kept = self._kept_batch()
        found = []
        for number in range(rounds):
            found.append(self._round(kept))
            if self._context.world.is_leader:
                control.notify("round", done=number + 1, total=rounds)
        state_bytes, copy_s = self._copy_of_state()
        return {
            "rounds": found[1:],  # in the first one graphs are traced and kernels loaded
            "steps": self._steps,
            "settling": self._settling,
            "chunk_steps": chunk,
            "local": self._data.local,
            "repeats": (2 * rounds + 1) * kind_steps > epoch_steps,
            "cores": len(os.sched_getaffinity(0)),
            "ranks_of_host": self._context.world.ranks_per_node,
            "state_bytes": state_bytes,
            "copy_s": copy_s,
        }

    def _round(self, kept: tf.data.Dataset) -> dict[str, dict[str, float]]:
        found, near = {SYNTHETIC: self._fit(kept, self._loop(SYNTHETIC, 0, _SETTLING_STEPS))}, self._data.near
        # What the last round's cold data have driven out comes back before it is counted.
        self._alone("what is cached", near, 0)
        found[CACHED_ALONE] = self._alone(CACHED_ALONE, near, 0)
        found[CACHED] = self._fed(CACHED, near, 0)
        found[COLD_ALONE] = self._alone(COLD_ALONE, self._data.far(), self._next_cold_place())
        found[COLD] = self._fed(COLD, self._data.far(), self._next_cold_place())
        return found

    def _kept_batch(self) -> tf.data.Dataset:
        """One batch, the first, without end."""
        with FeedPipeline(self._data.near, 0, 1, None, self._augmentation) as pipeline:
            batch = next(iter(pipeline.dataset))
        options = tf.data.Options()
        options.autotune.enabled = False  # as in FeedPipeline
        return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)

    def _next_cold_place(self) -> int:
        place = self._cold_place
        self._cold_place += self._stride
        return place

    def _fed(self, kind: str, feed: Feed, first: int) -> dict[str, float]:
        loop = self._loop(kind, first, self._settling)
        with FeedPipeline(
            feed, first, first + _NO_END, lambda batch: loop.clock.batch_is_ready(batch.step), self._augmentation
        ) as pipeline:
            return self._fit(pipeline.dataset, loop, pipeline)

    def _fit(
        self, dataset: tf.data.Dataset, loop: ProfileLoop, pipeline: FeedPipeline | None = None
    ) -> dict[str, float]:
        micro = self._config.micro_batches
        dataset = split(dataset, micro).apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        self._comm.barrier()
        try:
            self._model.fit(
                to_device(dataset),
                epochs=1,
                steps_per_epoch=loop.all_steps * micro,
                callbacks=loop.callbacks(self._model, micro),
                verbose=0,
                shuffle=False,
            )
        except Exception as error:
            # TensorFlow repeats the text of an exception in Python code, not the exception.
            cause = self._exchange.fault() or self._step.error or (pipeline and pipeline.failure) or error
            if cause is error:
                raise
            raise cause from None
        return loop.result()

    def _loop(self, kind: str, first: int, settling: int) -> ProfileLoop:
        rank = self._context.world.rank
        return ProfileLoop(self._context.control, rank, self._exchange, kind, first, settling, self._steps)

    def _alone(self, kind: str, feed: Feed, first: int) -> dict[str, float]:
        """As many batches as steps are measured, handed to TensorFlow one after another."""
        self._context.control.beat(self._exchange.step, f"measure the input: {kind}")
        self._comm.barrier()
        began = (0.0, 0.0)
        with FeedPipeline(feed, first, first + _NO_END, None, self._augmentation) as pipeline:
            for number, _ in enumerate(pipeline.dataset):
                if number == self._settling:
                    began = (time.perf_counter(), time.process_time())
                elif number == self._settling + self._steps:
                    break
            seconds, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        return {"steps": float(self._steps), "seconds": seconds, "cpu_s": cpu_s}

    def _copy_of_state(self) -> tuple[int, float]:
        """Bytes of what a checkpoint holds, and seconds for which a step waits until this rank's part is copied."""
        buffer, times, size = HostBuffer(), [], 0
        for _ in range(_COPIES + 1):
            began = time.perf_counter()
            size = buffer.fill(model_state.views_of(self._model, model_state.WEIGHTS, model_state.OPTIMIZER)).size
            times.append(time.perf_counter() - began)
        # The first one touches new memory, which a run does beside its steps.
        return int(size), statistics.median(times[1:]) / self._comm.num_ranks

    def _largest(self, number: int) -> int:
        """Of all ranks; a collective."""
        largest = np.array([number], np.int64)
        self._comm.all_reduce(largest, "max")
        return int(largest[0])
