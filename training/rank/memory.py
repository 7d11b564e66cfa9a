"""What memory a rank takes, by the size of its model; docs/operations.md has what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras
import psutil
import tensorflow as tf

STEP_BYTES = 100 << 20  # the traced step, buffers of batches: 70 to 110 MiB from 20 thousand to 56 million parameters
SAVED = 1.25  # of weights and optimizer's state: Keras makes a .keras file in a buffer that grows
ARENA_BYTES = 64 << 20  # of a small model: gaps between buffers, what measures the links
SPARE_BYTES = 700 << 20  # a process that has imported TensorFlow


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def variable_bytes(variables: Iterable[keras.Variable]) -> int:
    """The bytes of these variables' values."""
    return sum(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables)


def arena_bytes(model: keras.Model) -> int:
    """Address space for the buffers in which this rank adds gradients and statistics with the ranks of its host.

    A step fills one set of buffers, and a second one while TensorFlow still holds the last step's sums; a table whose
    rows are added as a whole needs one more. What does not fit is an array of the rank's own, which is copied.
    """
    return ARENA_BYTES + 4 * variable_bytes(model.weights)


def reckoned_bytes(before_bytes: int, model: keras.Model, num_ranks: int, *, spare: bool = False) -> int:
    """The most resident memory of a rank that had `before_bytes` before the compiled `model` was built.

    Weights and the optimizer's state, gradients, the buffers that ranks share to add them (its own and its part of the
    others'), its share of a checkpoint's copy, and at the end of the run Keras' copy of the file that it saves, on rank
    0. What layers keep for the backward pass is not counted: it depends on the batch.
    """
    gradients = variable_bytes(model.trainable_variables)
    state = variable_bytes([*model.weights, *model.optimizer.variables])
    shared = variable_bytes(model.weights) * (2 - 1 / num_ranks) if num_ranks > 1 else 0
    needed = before_bytes + STEP_BYTES + gradients + shared + state * (1 + 1 / num_ranks + SAVED)
    return int(needed) + (SPARE_BYTES if spare else 0)
