"""Losses of single outputs, weighed by the rows of their batches, so that they do not depend on where batches end.

Keras weighs the whole loss so. For that of each output it takes the rows from the static shape, which batches of uneven
size do not have: a last batch of one row then counts as much as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from training.steps.compiled_losses import changed_losses
from training.steps.patching import swapped


@contextmanager
def weighed_by_rows(model: keras.Model, data: Any) -> Iterator[None]:
    """While a step of `model` on the batch `data` (what train_step and test_step are given) is traced or run."""

    def changes(losses: Any) -> Iterator[AbstractContextManager[None]]:
        for metric in losses.metrics:  # none where there is one output
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            rows = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
            yield swapped(metric, "update_state", partial(_update, metric.update_state, rows))

    with changed_losses(model, changes):
        yield


def weigh_tests(model: keras.Model) -> None:
    """Have `evaluate` of `model`, and the validation of its `fit`, weigh so from now on."""
    plain = model.test_step
    if getattr(plain, "weighs_by_rows", False):
        return

    def test_step(data: Any) -> Any:
        with weighed_by_rows(model, data):
            return plain(data)

    test_step.weighs_by_rows = True  # type: ignore[attr-defined]  # a mark, for the second call
    object.__setattr__(model, "test_step", test_step)  # past Keras' tracking
    model.test_function = None


def _update(plain: Any, rows: Any, value: Any, sample_weight: Any = None) -> Any:
    return plain(value, sample_weight=rows)
