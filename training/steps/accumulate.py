"""Gradient accumulation: micro-gradients are added on each rank alone, and reduced once, with the last of them.

Keras' optimizers have the accumulators and count the micro-batches, in private attributes alone. On the last one of a
cycle the rank's sum is exchanged in place of the micro-gradient, and the accumulators are emptied, so that Keras' own
update divides the global sum. Ranks count alike, so all of them exchange at the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from training.steps.ordered import put_last, tail

Gradients = list[Any]


def steps_of(optimizer: keras.optimizers.Optimizer) -> int:
    """Micro-batches of one update, 1 without accumulation."""
    return optimizer.gradient_accumulation_steps or 1


def is_first(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether this micro-batch begins a cycle; bool ()."""
    return tf.equal(optimizer._iterations.value % steps_of(optimizer), 0)


def is_last(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Whether this micro-batch ends a cycle; bool ()."""
    return tf.equal((optimizer._iterations.value + 1) % steps_of(optimizer), 0)


def local_sums(optimizer: keras.optimizers.Optimizer, grads: Gradients, variables: list[Any]) -> Gradients:
    """This rank's micro-gradients so far, the present ones included; None where None.

    Of the scale that `grads` have: with `loss_scale_factor` Keras divides by it before it accumulates.
    """
    factor = optimizer.loss_scale_factor

    def so_far(grad: Any, variable: Any) -> tf.Tensor:
        held = tf.cast(_accumulator(optimizer, variable), grad.dtype)
        return grad + (held if factor is None else held * tf.cast(factor, grad.dtype))

    return [None if grad is None else so_far(grad, variable) for grad, variable in zip(grads, variables, strict=True)]


def empty(optimizer: keras.optimizers.Optimizer) -> None:
    """Set all accumulators to zero."""
    for accumulator in optimizer._accumulated_gradients:
        if accumulator is not None:
            accumulator.assign(tf.zeros_like(accumulator.value))


def reduced_at_last(
    optimizer: keras.optimizers.Optimizer,
    grads: Gradients,
    variables: list[Any],
    reduce: Callable[[Gradients], Gradients],
    hold: Callable[[], Any],
) -> Gradients:
    """What Keras' `apply` is to be given for this micro-batch: the ranks' sum on the last of a cycle, else `grads`."""
    grads = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
    present = [i for i, grad in enumerate(grads) if grad is not None]

    def last() -> Gradients:
        reduced = reduce(local_sums(optimizer, grads, variables))
        with tf.control_dependencies([reduced[i] for i in present]):  # the sums have been read
            empty(optimizer)
        return [tf.identity(reduced[i]) for i in present]

    def held() -> Gradients:
        with tf.control_dependencies([hold()]):
            return [tf.identity(grads[i]) for i in present]

    result: Gradients = [None] * len(grads)
    with tf.control_dependencies(tail()):
        values = tf.cond(is_last(optimizer), last, held)
    put_last(values[0])
    for i, value in zip(present, values, strict=True):
        value.set_shape(grads[i].shape)
        result[i] = value
    return result


def _accumulator(optimizer: keras.optimizers.Optimizer, variable: Any) -> tf.Tensor:
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value
