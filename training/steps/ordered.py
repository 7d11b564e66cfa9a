"""Small collectives in the middle of a step: each waits for the one traced before it.

An executor may start independent operations in any order, a different one on each rank: two ranks that wait in
different collectives would wait for ever. So the collectives of a step form one chain of control dependencies, in the
order of the trace, which is the same on all ranks. They use a group of the communicator, since the exchange reduces
gradients at the same time. The exchange's await comes after `tail`, the end of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator

_LAST: WeakKeyDictionary[Any, tf.Operation] = WeakKeyDictionary()  # graph -> the end of its chain


def tail() -> list[tf.Operation]:
    """The last collective of the graph that is being traced; none in eager mode, where operations run in order."""
    if tf.executing_eagerly():
        return []
    last = _LAST.get(tf.compat.v1.get_default_graph())
    return [] if last is None else [last]


def put_last(tensor: tf.Tensor) -> None:
    """Make what computes `tensor` the end of its graph's chain: an exchange's await, or a branch that has one."""
    if not tf.executing_eagerly():
        _LAST[tf.compat.v1.get_default_graph()] = tensor.op


class Calls:
    """Functions of NumPy arrays that wait for other ranks, called one after another from a step's graph."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The exception that a function raised: TensorFlow repeats only its text."""

    def call(self, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[tf.Tensor]:
        """The results of `function(*arrays)`, after all collectives of this graph that were traced before."""

        def guarded(*arrays: Any) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = error
                raise

        with tf.control_dependencies(tail()):
            outputs: list[tf.Tensor] = tf.nest.flatten(
                tf.numpy_function(guarded, list(inputs), list(dtypes), name="ranks")
            )
        put_last(outputs[0])
        return outputs


class OrderedCalls(Calls):
    """Calls that are refused outside of the step's own graph, where ranks might make them in other orders."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator.on_host
        self._home: Any = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While a step is traced (or run, in eager mode): allow collectives only in the graph that is current now."""
        before, self._home = self._home, _graph()
        try:
            yield
        finally:
            self._home = before

    def call_in_step(
        self, function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], who: str
    ) -> list[tf.Tensor]:
        """Make a call as `call` does, from within a step's graph. `who` names the caller in errors.

        Raises ConfigError if the graph is a loop, a branch or a function of its own within the step.
        """
        graph = _graph()
        if graph is not self._home:
            self.error = ConfigError(
                f"{who} calls other ranks within a loop, a branch or a tf.function of its own",
                got=f"a call in {getattr(graph, 'name', 'eager mode')}, not in the step's own graph",
                allowed="calls in the model's train_step, whose order is the same on all ranks",
                next_step="Call it outside of tf.while_loop, tf.cond, RNN cells and nested tf.functions, "
                "or use --batchnorm local.",
            )
            raise self.error
        return self.call(function, inputs, dtypes)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
