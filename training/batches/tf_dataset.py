"""Batches as a tf.data pipeline. TensorFlow is imported here and nowhere else between a shard and a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.features.schema.signature import Signature
from lockstep.training.batches.augmenting import Augmentation
from lockstep.training.batches.feed import Batch
from lockstep.training.batches.training_set import Feed

# Batches that are ready as tensors while a step runs, after the feed's own read-ahead. One is enough for equal steps,
# the second evens out a slow one.
PREFETCH_BATCHES = 2

Arrays = Sequence[npt.NDArray[Any]]
"""The features of a batch in the order of a signature, then its label and weight if it has them."""


def pipeline_options() -> tf.data.Options:
    """Options of all pipelines: deterministic, without the autotuner."""
    options = tf.data.Options()
    # The autotuner of TensorFlow 2.21 holds up the end of each iteration by up to as long as it ran.
    options.autotune.enabled = False
    options.deterministic = True
    options.experimental_optimization.map_parallelization = False  # of maps that are declared stateless
    return options


class ArrayPipeline:
    """Batches first..last-1 of `make(number)` as `dataset`: (x by feature name, y), x alone without a label, and
    (x, y, weights) where samples have weights.

    `rows` is the size of every batch, None if sizes differ. Batches are made one after another, in order, in a thread
    of TensorFlow. tf.data repeats only the text of an exception: the original is in `failure`, for the caller to raise.
    """

    def __init__(
        self, signature: Signature, make: Callable[[int], Arrays], first: int, last: int, *, rows: int | None
    ) -> None:
        self.failure: BaseException | None = None
        self._make = make
        names = list(signature.features)
        specs = [*signature.features.values()]
        specs += [spec for spec in (signature.label, signature.weight) if spec is not None]
        dtypes = [tf.as_dtype(spec.dtype) for spec in specs]

        @tf.autograph.experimental.do_not_convert  # it has no control flow, and its source would be read each time
        def load(number: tf.Tensor) -> Any:
            # range + one numpy_function: from_generator is the same with three Python calls a batch instead of one.
            # Declared stateless: under op determinism tf.data removes every prefetch behind a stateful map, and each
            # step would wait while its batch is made. `range` calls it once for each number, in order.
            tensors = tf.numpy_function(self._arrays, [number], dtypes, stateful=False)
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.set_shape((rows, *spec.shape))
            x = dict(zip(names, tensors, strict=False))
            return x if signature.label is None else (x, *tensors[len(x) :])

        numbers = tf.data.Dataset.range(first, last)
        self.dataset = numbers.map(load, num_parallel_calls=None).with_options(pipeline_options())

    def _arrays(self, number: np.int64) -> list[npt.NDArray[Any]]:
        try:
            return list(self._make(int(number)))
        # tf.data would lose the class, and with it the exit code.
        except BaseException as error:
            self.failure = error
            raise


class FeedPipeline:
    """Batches first_step..last_step-1 of a feed as `dataset`, in the form of an ArrayPipeline.

    All batches have n_r rows; shapes are static. Each iteration starts at `first_step`. `augmentation` changes each
    batch, then `on_batch` sees it: both in TensorFlow's thread, in order, ahead of the step. `failure` is the exception
    that ended an iteration. Close the pipeline (it is a context manager) to end the read-ahead thread. `part` gives
    some of the batches, such as an epoch's.
    """

    def __init__(
        self,
        feed: Feed,
        first_step: int,
        last_step: int,
        on_batch: Callable[[Batch], None] | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._feed, self._last_step, self._on_batch = feed, last_step, on_batch
        self._batches: Generator[Batch, None, None] | None = None
        self._next_step = -1
        self._closed = False
        self._lock = threading.Lock()
        self._augmentation = augmentation
        self._signature = feed.encoder.signature if augmentation is None else augmentation.signature
        self._names = list(self._signature.features)
        self._first_step = first_step
        self._pipeline: ArrayPipeline | None = None

    @property
    def dataset(self) -> tf.data.Dataset:
        """All batches."""
        return self.part(self._first_step, self._last_step)

    def part(self, first: int, last: int) -> tf.data.Dataset:
        """Batches first..last-1. The feed reads ahead beyond them, so that a part which follows begins at once. Use one
        part, or `dataset`, at a time.
        """
        self._pipeline = pipeline = ArrayPipeline(self._signature, self._arrays, first, last, rows=self._feed.rows)
        return pipeline.dataset.prefetch(PREFETCH_BATCHES)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended an iteration."""
        return None if self._pipeline is None else self._pipeline.failure

    def close(self) -> None:
        """End the read-ahead thread, and any iteration that TensorFlow has not ended yet."""
        with self._lock:
            self._closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arrays(self, step: int) -> Arrays:
        with self._lock:
            if self._closed:  # a prefetch thread of TensorFlow may outlive the caller's loop for a moment
                raise RuntimeError("the pipeline of batches is closed")
            if self._batches is None or step != self._next_step:
                self._end()
                self._batches = self._feed.batches(step, self._last_step)
            batch = next(self._batches)
            self._next_step = step + 1
        if self._augmentation is not None:
            batch = self._augmentation(batch)
        if self._on_batch is not None:
            self._on_batch(batch)
        arrays = [batch.x[name] for name in self._names]
        return [*arrays, *(array for array in (batch.y, batch.weight) if array is not None)]

    def _end(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


def to_device(dataset: tf.data.Dataset, device: str | None = None) -> tf.data.Dataset:
    """The dataset, whose next batch is copied to the device while a step runs.

    The device is the first GPU by default; without a GPU the dataset is returned unchanged. Apply this last.
    """
    if device is None:
        gpus = tf.config.list_logical_devices("GPU")
        if not gpus:
            return dataset
        device = gpus[0].name
    # prefetch_to_device is these two, with a buffer that its autotuner sizes.
    return dataset.apply(tf.data.experimental.copy_to_device(device)).prefetch(1)
