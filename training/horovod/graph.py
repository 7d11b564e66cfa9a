"""Functions of NumPy arrays called from eager code and from graphs, in one order on every rank.

A graph's executor may start operations that do not depend on each other in any order, and two ranks that wait in
different calls wait for ever, most surely where there is one inter-op thread. So each call reads a variable and writes
it: tf.function keeps the program's order between uses of one variable, through branches and functions in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_turns: list[tf.Variable] = []


def run(
    function: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """`function(*arrays)` -> arrays as `specs` say; runs at once in eager mode, else when the graph runs."""
    if tf.executing_eagerly():
        results = function(*map(np.asarray, tensors))  # views: nothing here writes to its arguments
        return [tf.convert_to_tensor(value, spec.dtype) for value, spec in zip(results, specs, strict=True)]

    def taken(turn: Any, *arrays: Any) -> list[Any]:
        return [turn + 1, *function(*arrays)]

    order = _turn()
    # Ranks wait here: nothing of it may be on a device whose kernels run in their own order.
    with tf.device("CPU:0"):
        turn, *results = tf.numpy_function(
            taken, [order.read_value(), *tensors], [tf.int64, *(spec.dtype for spec in specs)], name="horovod"
        )
        order.assign(turn)
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    return results


def _turn() -> tf.Variable:
    if not _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            _turns.append(tf.Variable(0, trainable=False, dtype=tf.int64, name="horovod_turn"))
    return _turns[0]
