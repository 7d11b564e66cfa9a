"""A rank's part of lockstep profile_run: it measures a compiled step on three kinds of data in turn, and the input."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.storage.urls import split_url
from lockstep.training.batches.augmenting import augmentation_of, labels_of
from lockstep.training.batches.tf_dataset import PREFETCH_BATCHES, FeedPipeline, pipeline_options
from lockstep.training.batches.training_set import Feed, TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.control.client import ControlClient
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import OPENING
from lockstep.training.exchange.agreement import NonFinitePolicy
from lockstep.training.exchange.exchange import Exchange
from lockstep.training.profiling.profile import ProfileOrder, RankProfile, RoundDone
from lockstep.training.profiling.verdict import CACHED, CACHED_ALONE, COLD, COLD_ALONE, SYNTHETIC
from lockstep.training.rank.callbacks import RunCallbacks
from lockstep.training.rank.metrics import StepClock
from lockstep.training.rank.prepare import RankModel, agreement_on
from lockstep.training.reading.reader import ReadOptions, SplitReader
from lockstep.training.reading.selecting import selection_of
from lockstep.training.run.checkpoint import HostBuffer
from lockstep.training.run.metrics import PARTS
from lockstep.training.steps import model_state
from lockstep.training.world import World

# A batch that read-ahead never reaches: the measurement is in the middle of the reading, not at its end.
_NO_END = 1 << 40
_CHUNKS = 2  # measured at least, since the batches of one chunk are ready at once
_LEAST_STEPS, _MOST_STEPS = 16, 512
_COPIES = 3
# Until the batches that are ready before the first step are used, and the feed makes one after another.
_SETTLING_STEPS = PREFETCH_BATCHES + 2


class ProfileLoop:
    """Times steps `settling` + 1 .. `settling` + `steps` of one `fit` call, whose first batch is number `first`."""

    def __init__(
        self, control: ControlClient, rank: int, exchange: Exchange, kind: str, first: int, settling: int, steps: int
    ) -> None:
        self._control, self._exchange, self._kind = control, exchange, kind
        self._first, self._settling, self._steps = first, settling, steps
        self._rows: list[dict[str, Any]] = []
        self.clock = StepClock(self, rank, exchange)
        self._done = 0
        self._began = self._ended = (0.0, 0.0)

    @property
    def all_steps(self) -> int:
        """Steps of the `fit` call."""
        return self._settling + self._steps

    def notify(self, kind: str, **fields: Any) -> None:
        """Keep the rows that the clock sends."""
        self._rows += fields["rows"]

    def callbacks(self, model: Any, micro_batches: int) -> RunCallbacks:
        """Callbacks for the `fit` call; the model's own are not called."""
        callbacks = RunCallbacks([], model, self, epochs=1, steps=self.all_steps, micro_batches=micro_batches)
        callbacks.begin()
        return callbacks

    def result(self) -> dict[str, float]:
        """Return {steps, seconds, cpu_s (of the process), data_s, compute_s, exchange_s, checkpoint_s, other_s}."""
        sums = {part: sum(float(row[part]) for row in self._rows) for part in PARTS}
        return {
            "steps": float(self._steps),
            "seconds": self._ended[0] - self._began[0],
            "cpu_s": self._ended[1] - self._began[1],
            **sums,
        }

    # Called by RunCallbacks

    def epoch_begins(self, epoch: int) -> bool:
        """Every epoch starts with fresh metrics."""
        return True

    def step_begins(self) -> None:
        """Start timing the step."""
        self.clock.begins()

    def step_ends(self, epoch: int) -> None:
        """Count the step; the measurement begins and ends here."""
        agreement = agreement_on(self._exchange, self._exchange.step)
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
        """Return the logs unchanged; they are unused."""
        return logs

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Do nothing."""


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class ProfileData(AbstractContextManager["ProfileData"]):
    """The data of one rank. `near` is a feed whose batches are read repeatedly: from the page cache if the dataset is
    on this host's disk and no --cache is set, else from a block cache in a temporary folder.

    Raises ConfigError for a --cache that cannot be written, DataError if the order's plan is of another dataset.
    """

    def __init__(self, config: TrainConfig, world: World, identity: Mapping[str, Any]) -> None:
        self._config, self._world = config, world
        self._stack = ExitStack()
        self._folder: str | None = None
        self._far: TrainingSet | None = None
        self._far_folder: str | None = None
        self._cold_bytes = 0  # of far sets that were let go
        self.local = all(split_url(url)[0] == "file" for url in config.data.datasets)
        """Whether all shards are on this host's disk."""
        try:
            if config.reading.cache is not None or not self.local:
                self._folder = self._stack.enter_context(_folder_on(config.reading.cache))
            opened = self._open(self._folder and f"{self._folder}/near")
            self.plan = opened.plan(identity)
            self.signature = opened.encoder.signature
            self.near = self._feed(opened)
        except BaseException:
            self._stack.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def far(self) -> Feed:
        """A feed whose blocks are in no cache of this host, as far as possible: pages of local shards are dropped, and
        a block cache is empty and fills as in a run's first epoch. Ends the feed of an earlier call.
        """
        if self._far is None or self._config.reading.cache is not None:
            self._let_go()
            cache = None
            if self._config.reading.cache is not None:
                assert self._folder is not None
                cache = self._far_folder = tempfile.mkdtemp(prefix="far-", dir=self._folder)
            self._far = self._open(cache)
        if self.local:
            for reader in self._far.readers:
                for _, url, _ in reader.stored:
                    drop_pages(split_url(url)[2])
        return self._feed(self._far)

    def bytes_read(self) -> dict[str, int]:
        """Bytes that were fetched for cold data so far, that a pass over the split fetches, and of its shards."""
        readers = [] if self._far is None else self._far.readers
        return {
            "fetched_bytes": self._cold_bytes + _fetched(readers),
            "pass_bytes": sum(reader.pass_bytes for reader in readers),
            "split_bytes": sum(info.bytes for reader in readers for _, _, info in reader.stored),
        }

    def _let_go(self) -> None:
        if self._far is not None:
            self._cold_bytes += _fetched(self._far.readers)
            for reader in self._far.readers:
                reader.close()
        if self._far_folder is not None:
            shutil.rmtree(self._far_folder)  # each cold round has as much room as a run

    def _feed(self, opened: TrainingSet) -> Feed:
        return opened.feed(self.plan, self._world, groups=self._config.step.lane_groups)

    def _open(self, cache: str | None) -> TrainingSet:
        config = self._config
        options = replace(
            ReadOptions.of(config, self._world.num_ranks), cache=cache, cache_bytes=config.reading.cache_bytes
        )
        opened = TrainingSet.at(
            config.data.datasets,
            config.data.split,
            config.data.mix,
            options,
            selection_of(config),
            tasks=config.data.tasks is not None,
        )
        for reader in opened.readers:
            self._stack.callback(reader.close)
        return opened.skipping_bad_images() if config.reading.bad_images == "skip" else opened


def _fetched(readers: Sequence[SplitReader]) -> int:
    return sum(reader.counts.fetched.fetched_bytes for reader in readers)


def drop_pages(path: str) -> None:
    """Drop the pages of a file from the kernel's cache, after writing dirty ones to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)  # only clean pages can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _folder_on(cache: str | None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the disk of --cache (in its nearest existing parent), else in the default place."""
    parent = None if cache is None else next(str(p) for p in (Path(cache), *Path(cache).parents) if p.is_dir())
    try:
        return tempfile.TemporaryDirectory(prefix="lockstep-profile-", dir=parent)
    except OSError as error:
        raise ConfigError(
            f"{parent or 'the folder of temporary files'} cannot hold a cache",
            got=error.strerror or str(error),
            allowed="a folder on a local disk that this user may write",
            next_step="Give --cache another folder, or set TMPDIR.",
        ) from error


class ProfileRank(AbstractContextManager["ProfileRank"]):
    """Every rank makes the same calls in the same order."""

    def __init__(self, context: RankContext, order: ProfileOrder) -> None:
        config = order.config
        self._context, self._order, self._config = context, order, config
        with ExitStack() as stack:
            context.control.beat(0, OPENING)
            grid = config.way.grid(config.ranks.num_ranks)
            self._data = stack.enter_context(ProfileData(config, grid.data_world(context.world), order.plan))
            plan, signature = self._data.plan, self._data.signature
            self._augmentation = augmentation_of(config, plan, signature)
            non_finite = NonFinitePolicy(config.exactness.non_finite == "skip")
            labels, rows = labels_of(config, signature), self._data.near.rows
            self._rank_model = RankModel(context, config, plan, labels, rows, non_finite)
            self._model, self._comm = self._rank_model.model, self._rank_model.communicator
            self._exchange = self._rank_model.exchange
            stack.callback(self._exchange.close)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._rank_model.abort(error)
        self._stack.close()

    def run(self) -> dict[str, Any]:
        """Measure; returns a RankProfile as JSON."""
        control, plan = self._context.control, self._data.plan
        self._rank_model.install_step()
        if (data := self._rank_model.strategy.data).num_ranks > 1:
            model_state.derive_seeds(self._model, self._config.data.seed, 0, data.rank)
        chunk = self._largest(self._data.near.chunk_steps)
        self._steps = self._order.steps or min(max(_CHUNKS * chunk, _LEAST_STEPS), _MOST_STEPS)
        self._settling = min(chunk, self._steps) + _SETTLING_STEPS  # for fed steps; the kept batch is ready
        rounds = self._order.rounds + 1
        # Cold measurements are far apart in the epoch, so that no two read the same block.
        kind_steps, epoch_steps = self._settling + self._steps, plan.total // plan.global_batch
        self._stride = self._cold_step = max(kind_steps, epoch_steps // (2 * rounds + 1))
        kept = self._kept_batch()
        found = []
        for number in range(rounds):
            found.append(self._round(kept))
            if self._context.world.is_leader:
                control.notify("round", **RoundDone(done=number + 1, total=rounds).to_json())
        state_bytes, copy_s = self._copy_of_state()
        return RankProfile(
            rounds=found[1:],  # the first one traces graphs and loads kernels
            steps=self._steps,
            settling=self._settling,
            chunk_steps=chunk,
            local=self._data.local,
            repeats=(2 * rounds + 1) * kind_steps > epoch_steps,
            cores=len(os.sched_getaffinity(0)),
            ranks_of_host=self._context.world.ranks_per_node,
            state_bytes=state_bytes,
            copy_s=copy_s,
            **self._data.bytes_read(),
        ).to_json()

    def _round(self, kept: tf.data.Dataset) -> dict[str, dict[str, float]]:
        found, near = {SYNTHETIC: self._fit(kept, self._loop(SYNTHETIC, 0, _SETTLING_STEPS))}, self._data.near
        # First reload what the last round's cold data have evicted.
        self._alone("refill the cache", near, 0)
        found[CACHED_ALONE] = self._alone(CACHED_ALONE, near, 0)
        found[CACHED] = self._fed(CACHED, near, 0)
        found[COLD_ALONE] = self._alone(COLD_ALONE, self._data.far(), self._next_cold_step())
        found[COLD] = self._fed(COLD, self._data.far(), self._next_cold_step())
        return found

    def _kept_batch(self) -> tf.data.Dataset:
        """The first batch, repeated endlessly."""
        with FeedPipeline(self._data.near, 0, 1, None, self._augmentation) as pipeline:
            batch = next(iter(pipeline.dataset))
        return tf.data.Dataset.from_tensors(batch).repeat().with_options(pipeline_options())

    def _next_cold_step(self) -> int:
        step = self._cold_step
        self._cold_step += self._stride
        return step

    def _fed(self, kind: str, feed: Feed, first: int) -> dict[str, float]:
        loop = self._loop(kind, first, self._settling)
        with FeedPipeline(
            feed, first, first + _NO_END, lambda batch: loop.clock.batch_is_ready(batch.step), self._augmentation
        ) as pipeline:
            return self._fit(pipeline.dataset, loop, pipeline)

    def _fit(
        self, dataset: tf.data.Dataset, loop: ProfileLoop, pipeline: FeedPipeline | None = None
    ) -> dict[str, float]:
        callbacks = loop.callbacks(self._model, self._config.step.micro_batches)
        self._comm.barrier()
        self._rank_model.fit(dataset, loop.all_steps, callbacks, pipeline=pipeline)
        return loop.result()

    def _loop(self, kind: str, first: int, settling: int) -> ProfileLoop:
        rank = self._context.world.rank
        return ProfileLoop(self._context.control, rank, self._exchange, kind, first, settling, self._steps)

    def _alone(self, kind: str, feed: Feed, first: int) -> dict[str, float]:
        """Time as many batches as steps are measured, without the steps."""
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
        """Bytes of a checkpoint, and seconds for which a step waits while this rank's part is copied."""
        buffer, times, size = HostBuffer(), [], 0
        for _ in range(_COPIES + 1):
            began = time.perf_counter()
            size = buffer.fill(model_state.views_of(self._model, model_state.WEIGHTS, model_state.OPTIMIZER)).size
            times.append(time.perf_counter() - began)
        # The first one touches new memory, which a run does in the background.
        return int(size), statistics.median(times[1:]) / self._comm.num_ranks

    def _largest(self, number: int) -> int:
        """The largest of all ranks' numbers. A collective."""
        largest = np.array([number], np.int64)
        self._comm.all_reduce(largest, "max")
        return int(largest[0])
