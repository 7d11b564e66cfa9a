"""Estimates the memory of a rank from the size of its model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

STEP_BYTES = 100 << 20  # the traced step, buffers of batches: 70 to 110 MiB from 20 thousand to 56 million parameters
SAVED = 1.25  # of weights and optimizer state: Keras writes a .keras file to a buffer that grows
ARENA_BYTES = 64 << 20  # of a small model: gaps between buffers, what measures the links


def variable_bytes(variables: Iterable[keras.Variable]) -> int:
    """The bytes of these variables' values."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def optimizer_bytes(model: keras.Model) -> int:
    """The bytes of the optimizer's whole state, also before it is built."""
    optimizer = model.optimizer
    if optimizer.built:
        return variable_bytes(optimizer.variables)
    twin = type(optimizer).from_config(optimizer.get_config())
    one = keras.Variable(np.zeros(1), dtype="float32", trainable=True)
    twin.build([one])
    slots = len(twin.variables) - len(optimizer.variables)
    return variable_bytes(optimizer.variables) + slots * variable_bytes(model.trainable_variables)


def arena_bytes(model: keras.Model) -> int:
    """Address space for the buffers in which the ranks of a host add gradients and statistics.

    A step fills one set of buffers, and a second one while TensorFlow still holds the sums of the last step; a table
    whose rows are added as a whole needs another one. Buffers that do not fit are private arrays, which are copied.
    """
    return ARENA_BYTES + 4 * variable_bytes(model.weights)


def reckoned_bytes(before_bytes: int, model: keras.Model, num_ranks: int, zero: int = 0) -> int:
    """The most resident memory of a rank that had `before_bytes` before the compiled `model` was built.

    It counts weights and optimizer state, gradients, the shared buffers that add them (the rank's own and its part of
    the others'), its share of a checkpoint's copy, and on rank 0 the copy of the file that Keras saves at the end. It
    does not count what layers keep for the backward pass, which depends on the batch. With `zero`, the stage of --zero,
    a rank counts its part of what is divided. Rank 0 saves such a model one tensor after another.
    """
    gradients = variable_bytes(model.trainable_variables)
    state = variable_bytes(model.weights) + optimizer_bytes(model)
    shared = variable_bytes(model.weights) * (2 - 1 / num_ranks) if num_ranks > 1 else 0
    if zero and num_ranks > 1:
        part, largest = 1 / num_ranks, max(variable_bytes([one]) for one in model.weights)
        held = state - optimizer_bytes(model) * (1 - part)
        if zero == 1:
            held += gradients + shared
        elif zero == 2:
            held += gradients * (1 + part)  # TensorFlow holds those that a slow network has not taken
        else:  # a model is built whole, before its parts are taken
            held = max(variable_bytes(model.weights), held - gradients * (1 - 2 * part))
        return int(before_bytes + STEP_BYTES + held + state * part + 2 * largest)
    return int(before_bytes + STEP_BYTES + gradients + shared + state * (1 + 1 / num_ranks + SAVED))
