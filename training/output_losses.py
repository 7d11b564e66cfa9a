"""Losses of single outputs, weighed by the rows of their batches, so that they do not depend on where batches end.

Keras weighs the whole loss so. For that of each output it takes the rows from the static shape, which batches of uneven
size do not have: a last batch of one row then counts as much as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from training.swap import swapped


@contextmanager
def weighed_by_rows(model: keras.Model, data: Any) -> Iterator[None]:
    """While a step of `model` on the batch `data` (what train_step and test_step are given) is traced or run."""
    losses = model._compile_loss  # Keras has no public way to what `compile` made of the losses
    with ExitStack() as stack:

        def weigh() -> None:
            for metric in losses.metrics:  # none where there is one output
                x = keras.utils.unpack_x_y_sample_weight(data)[0]
                rows = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
                stack.enter_context(swapped(metric, "update_state", partial(_update, metric.update_state, rows)))

        if losses is not None and losses.built:
            weigh()
        elif losses is not None:  # the step's first loss builds it
            plain = losses.build

            def build(*args: Any) -> None:
                plain(*args)
                weigh()

            stack.enter_context(swapped(losses, "build", build))
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
