"""A step that all ranks skip, since something was not finite, leaves the model as the step found it.

The optimizer applies nothing then; here is the rest: moving averages and what else the forward pass has changed, and
metrics, which one such batch would make not finite for the whole epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from training.steps.distribute import exchange_of, skipped_of


class SkippedStep:
    """The state of `model` besides trained weights, put back after a step that its distributed optimizer skipped."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    @contextmanager
    def step(self, result: dict[str, Any]) -> Iterator[None]:
        """While the whole of a training step is traced (or run, in eager mode), the optimizer's `apply` included.

        `result` is filled with what the step returns, the metrics; these are taken anew where they are the model's.
        """
        model = self._model
        if not exchange_of(model.optimizer).skips_any:
            yield
            return
        variables = [*model.non_trainable_weights, *model.metrics_variables]
        before = [tf.identity(variable.value) for variable in variables]
        yield
        skipped = tf.equal(skipped_of(model.optimizer), 1)
        for variable, old in zip(variables, before, strict=True):
            variable.assign(tf.where(skipped, old, variable.value))
        metrics = model.get_metrics_result()
        if set(metrics) == set(result):
            result.update(metrics)
