"""A step that loss scaling skips leaves moving averages as they were, on every rank.

A number that overflows in the forward pass of float16 reaches the moving averages of batch normalisations before
anything is known of gradients. Keras skips the update of the weights alone: the averages are then no numbers for ever,
and so is what the model predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from training.steps.accumulate import is_first, steps_of
from training.steps.batchnorm import statistics_of


class KeptStatistics:
    """The moving averages of `model`, whose optimizer is distributed, as they were before its last step began.

    Without loss scaling nothing is kept: there what is not finite ends the run.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before: list[tf.Variable] = []  # with gradient accumulation: as they were before its first micro-batch

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the whole of a training step is traced (or run, in eager mode), the optimizer's `apply` included."""
        optimizer = self._model.optimizer
        statistics = statistics_of(self._model)
        if not (isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and statistics):
            yield
            return
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        scale = tf.identity(optimizer.dynamic_scale.value)
        before = self._kept([tf.identity(variable.value) for variable in statistics], optimizer.inner_optimizer)
        yield
        skipped = optimizer.dynamic_scale.value < scale  # nothing else lowers it
        for variable, old in zip(statistics, before, strict=True):
            variable.assign(tf.where(skipped, old, variable.value))

    def _kept(self, values: list[Any], counts: keras.optimizers.Optimizer) -> list[Any]:
        if steps_of(counts) == 1:
            return values
        if not self._before:
            with tf.init_scope():
                self._before = [tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False) for value in values]
        first = is_first(counts)
        for variable, value in zip(self._before, values, strict=True):
            variable.assign(tf.where(first, value, variable))
        return [variable.read_value() for variable in self._before]
