"""Loss scaling on N ranks: finiteness is judged on the sums over all ranks, so every rank scales and skips alike.

Without accumulation Keras' own LossScaleOptimizer does the rest, once it is given the sums. With accumulation the
ranks add unscaled micro-gradients and reduce once; what is not finite then skips the whole cycle on every rank, where
Keras alone would drop the one micro-batch: that would take a message between ranks for each of them. So the scale
grows by cycles too, not by micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from training.steps.accumulate import Gradients, empty, is_last, local_sums, steps_of
from training.steps.ordered import put_last, tail

POLICY = "mixed_float16"


def scaled(optimizer: keras.optimizers.Optimizer, *, automatic: bool) -> keras.optimizers.Optimizer:
    """`optimizer`, in a LossScaleOptimizer where `automatic` and the global policy is mixed_float16.

    As `compile` does it, which then finds it done.
    """
    scaling = keras.optimizers.LossScaleOptimizer
    if automatic and keras.config.dtype_policy().name == POLICY and not isinstance(optimizer, scaling):
        return scaling(optimizer, name="loss_scale_optimizer")
    return optimizer


def apply_in_cycles(
    optimizer: keras.optimizers.LossScaleOptimizer,
    grads: Gradients,
    variables: list[Any],
    reduce: Callable[[Gradients], Gradients],
    hold: Callable[[], Any],
) -> None:
    """`LossScaleOptimizer.apply` with an inner optimizer that accumulates."""
    inner = optimizer.inner_optimizer
    scale = optimizer.dynamic_scale.value
    grads = [None if g is None else tf.convert_to_tensor(g) / tf.cast(scale, g.dtype) for g in grads]

    def last() -> tf.Tensor:
        reduced = reduce(local_sums(inner, grads, variables))
        with tf.control_dependencies([grad for grad in reduced if grad is not None]):  # the sums have been read
            empty(inner)
            return tf.cond(optimizer.check_finite(reduced), lambda: update(reduced), skip)

    def update(reduced: Gradients) -> tf.Tensor:
        inner.apply(reduced, variables)
        count = optimizer.step_counter.value + 1
        full = tf.equal(count, optimizer.dynamic_growth_steps)
        optimizer.dynamic_scale.assign(tf.where(full, scale * 2.0, scale))
        optimizer.step_counter.assign(tf.where(full, tf.zeros_like(count), count))
        return tf.constant(True)

    def skip() -> tf.Tensor:
        inner._iterations.assign_sub(steps_of(inner) - 1)  # the cycle begins anew
        optimizer._stateful_handle_non_finite_grads()
        return tf.constant(False)

    def held() -> tf.Tensor:
        with tf.control_dependencies([hold()]):
            inner.apply(grads, variables)
            return tf.constant(True)

    with tf.control_dependencies(tail()):
        put_last(tf.cond(is_last(inner), last, held))
