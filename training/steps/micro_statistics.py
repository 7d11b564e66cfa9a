"""Moving averages of a step whose rows come in micro-batches: they move once a step, by the mean of all its rows.

Each micro-batch moves them from where the step found them, and the step leaves them at the mean of that, as it does
over ranks. Moved one after another instead, the last micro-batch would count most, and which rows are in it depends on
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from training.steps.accumulate import is_first, is_last
from training.steps.batchnorm import statistics_of
from training.steps.patching import swapped


class MicroStatistics:
    """The moving averages of `model`, whose optimizer accumulates over `micro_batches` parts of each rank's rows."""

    def __init__(self, model: keras.Model, micro_batches: int) -> None:
        self._model, self._micro_batches = model, micro_batches
        self._before: list[tf.Variable] = []
        self._sums: list[tf.Variable] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the whole of a training step is traced (or run, in eager mode), the optimizer's `apply` included."""
        optimizer, statistics = self._model.optimizer, statistics_of(self._model)
        if self._micro_batches == 1 or not statistics:
            yield
            return
        if not self._before:
            with tf.init_scope():
                self._before, self._sums = (
                    [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in statistics] for _ in range(2)
                )
        counts = getattr(optimizer, "inner_optimizer", optimizer)
        first, last = is_first(counts), is_last(counts)
        for variable, before, total in zip(statistics, self._before, self._sums, strict=True):
            before.assign(tf.where(first, variable.value, before))
            total.assign(tf.where(first, tf.zeros_like(total), total))
            variable.assign(before.read_value())
        plain = optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> None:
            """After the forward pass, and before the exchange of the last micro-batch takes the averages."""
            for variable, total in zip(statistics, self._sums, strict=True):
                total.assign_add(variable.value)
                variable.assign(tf.where(last, total / self._micro_batches, variable.value))
            plain(*args, **kwargs)

        with swapped(optimizer, "apply", apply):
            yield
