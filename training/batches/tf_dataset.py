"""The feed as a tf.data pipeline. TensorFlow is imported here and nowhere else on the way from shard to batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, Self

import numpy as np
import tensorflow as tf

from training.batches.augmenting import Augmentation
from training.batches.feed import Batch
from training.batches.training_set import Feed

# Batches that lie ready as tensors while a step runs; the feed's own read-ahead is behind them. One would do for equal
# steps, the second evens out a slow one.
PREFETCH_BATCHES = 2


class FeedPipeline:
    """Batches first_step..last_step-1 of a feed as `dataset`: (x by feature name, y), x alone without a label, and
    (x, y, weights) where samples have weights.

    Whole batches of fixed n_r rows, static shapes. Iterating again begins at `first_step` again. `on_batch` sees each
    batch when it is handed to TensorFlow, in order, from TensorFlow's thread; there `augmentation` changes it, ahead of
    the step that it is for. tf.data turns any exception into one of
    its own that only repeats the text: the original is kept in `failure`, for the caller to raise. Close it (a context
    manager) to end the read-ahead thread.
    """

    def __init__(
        self,
        feed: Feed,
        first_step: int,
        last_step: int,
        on_batch: Callable[[Batch], None] | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._feed, self._last_step, self._on_batch = feed, last_step, on_batch
        self._batches: Generator[Batch, None, None] | None = None
        self._next_step = -1
        self._closed = False
        self._lock = threading.Lock()
        self._augmentation = augmentation
        self._signature = feed.encoder.signature if augmentation is None else augmentation.signature
        self._names = list(self._signature.features)
        self.dataset = self._pipeline(first_step)

    def close(self) -> None:
        """End the read-ahead thread, and any iteration that TensorFlow has not ended yet."""
        with self._lock:
            self._closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pipeline(self, first_step: int) -> tf.data.Dataset:
        specs = [self._signature.features[name] for name in self._names]
        specs += [spec for spec in (self._signature.label, self._signature.weight) if spec is not None]
        dtypes = [tf.as_dtype(spec.dtype) for spec in specs]
        # range + one numpy_function: from_generator is the same with three Python calls a batch instead of one.
        steps = tf.data.Dataset.range(first_step, self._last_step)

        def load(step: tf.Tensor) -> Any:
            tensors = tf.numpy_function(self._arrays, [step], dtypes)
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.set_shape((self._feed.rows, *spec.shape))
            x = dict(zip(self._names, tensors, strict=False))
            return x if self._signature.label is None else (x, *tensors[len(x) :])

        options = tf.data.Options()
        # The autotuner of TensorFlow 2.21 holds up the end of each iteration by up to as long as it ran.
        options.autotune.enabled = False
        options.deterministic = True
        return steps.map(load, num_parallel_calls=None).prefetch(PREFETCH_BATCHES).with_options(options)

    def _arrays(self, step: np.int64) -> list[np.ndarray[Any, Any]]:
        try:
            batch = self._batch(int(step))
        # tf.data would lose the class, and with it the exit code; raised on, never hidden.
        except BaseException as error:
            self.failure = error
            raise
        arrays = [batch.x[name] for name in self._names]
        return [*arrays, *(array for array in (batch.y, batch.weight) if array is not None)]

    def _batch(self, step: int) -> Batch:
        with self._lock:
            if self._closed:  # a prefetch thread of TensorFlow's may outlive the caller's loop for a moment
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
        return batch

    def _end(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


def to_device(dataset: tf.data.Dataset, device: str | None = None) -> tf.data.Dataset:
    """The dataset with its next batch on the device already while a step runs; by default on the first GPU, where there
    is none the dataset itself. To be the last thing that is done to a dataset. Never run on a GPU.
    """
    if device is None:
        gpus = tf.config.list_logical_devices("GPU")
        if not gpus:
            return dataset
        device = gpus[0].name
    # prefetch_to_device is these two, with a buffer that its autotuner sizes.
    return dataset.apply(tf.data.experimental.copy_to_device(device)).prefetch(1)


def as_tf_dataset(feed: Feed, first_step: int, last_step: int) -> tf.data.Dataset:
    """The dataset of a FeedPipeline that ends its thread by itself when its batches are used up."""
    return FeedPipeline(feed, first_step, last_step).dataset
