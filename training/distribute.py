"""`distribute(optimizer, ...)`: the user's Keras optimizer, reducing gradients over all ranks before it applies them.

The object stays the user's own; its class becomes a subclass whose `apply` exchanges first. So it is the outermost
optimizer: clipping, decay and accumulation see the global gradients, equal bit for bit on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from storage.errors import ConfigError
from training.buckets import BUCKET_BYTES, lay_out
from training.comm.base import Communicator
from training.exchange import CONTROL_WORDS, Exchange
from training.ordered import tail

OptimizerT = TypeVar("OptimizerT", bound=keras.optimizers.Optimizer)


def distribute(
    optimizer: OptimizerT,
    communicator: Communicator,
    *,
    scale: float,
    statistics: Sequence[keras.Variable] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> OptimizerT:
    """Make `optimizer` reduce gradients over the ranks of `communicator`; returns the same object.

    `scale` is n_r / G, this rank's share of the global batch. `statistics` are float variables that the forward pass
    updates on each rank (moving averages): after each step they hold their mean, weighted by the shares.
    `exchange_of(optimizer)` is the exchange. Raises ConfigError for what would not be the outermost optimizer.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            "a loss scale optimizer cannot be distributed",
            got=type(optimizer).__name__,
            allowed="the optimizer itself: a loss scale around it would judge finiteness on one rank alone",
            next_step="Train in float32 or float64.",
        )
    if isinstance(optimizer, _Distributed) or tf.distribute.has_strategy():
        raise ConfigError(
            "this optimizer is distributed already",
            got=f"{type(optimizer).__name__} under {type(tf.distribute.get_strategy()).__name__}",
            allowed="one way to distribute",
            next_step="Call distribute once, outside any tf.distribute scope.",
        )
    plain = type(optimizer)
    # Saved models name the class and its module: those of the plain class, so that they load without Lockstep.
    names = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    state = _State(Exchange(communicator, scale), tuple(statistics), bucket_bytes, plain)
    object.__setattr__(optimizer, "_lockstep", state)  # past Keras' tracking of attributes
    object.__setattr__(optimizer, "__class__", type(plain.__name__, (_Distributed, plain), names))
    return optimizer


def undistribute(optimizer: keras.optimizers.Optimizer) -> None:
    """Give the optimizer its own class back and end its exchange."""
    state = _state(optimizer)
    object.__setattr__(optimizer, "__class__", state.plain)
    object.__delattr__(optimizer, "_lockstep")
    state.exchange.close()


def exchange_of(optimizer: keras.optimizers.Optimizer) -> Exchange:
    """The exchange of a distributed optimizer."""
    return _state(optimizer).exchange


class _State:
    def __init__(
        self, exchange: Exchange, statistics: tuple[keras.Variable, ...], bucket_bytes: int, plain: type
    ) -> None:
        self.exchange, self.statistics, self.bucket_bytes, self.plain = exchange, statistics, bucket_bytes, plain
        self.loss: tf.Tensor | None = None


def _state(optimizer: Any) -> _State:
    state: _State = optimizer._lockstep
    return state


class _Distributed:
    """Mixed in before the optimizer's own class."""

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Keras hands in the step's local mean loss here; it travels with the last bucket."""
        _state(self).loss = loss
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce, then apply."""
        state = _state(self)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        loss, state.loss = state.loss, None
        reduced = _reduce(state, grads, list(variables), loss)
        super().apply(reduced, trainable_variables)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Nothing: `fit` calls this after each of its calls, but a run ends once; see `finalize`."""


def finalize(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """What Keras does once at the end of `fit`: with `use_ema`, the averages become the weights."""
    super(_Distributed, optimizer).finalize_variable_values(variables)


def _reduce(state: _State, grads: Sequence[Any], variables: list[Any], loss: tf.Tensor | None) -> list[Any]:
    """The exchange as graph operations: gradients in, their sums over all ranks (scaled) out, None where None."""
    exchange = state.exchange
    present = [i for i, grad in enumerate(grads) if grad is not None]
    dense = [tf.convert_to_tensor(grads[i]) for i in present]  # sparse slices become whole tensors
    statistics = [variable.value for variable in state.statistics]  # read after the forward pass assigned them
    layout = lay_out(
        [(tuple(grad.shape), np.dtype(grad.dtype.as_numpy_dtype)) for grad in dense],
        [(tuple(value.shape), np.dtype(value.dtype.as_numpy_dtype)) for value in statistics],
        CONTROL_WORDS,
        state.bucket_bytes,
    )
    names = [f"the gradient of {variables[i].path}" for i in present]
    exchange.use(layout, names + [f"the statistic {variable.path}" for variable in state.statistics])
    order: list[Any] = []
    for bucket in range(len(layout.sizes)):
        posted = [dense[i] for i in layout.posted(bucket)]
        if posted:
            with tf.control_dependencies(order):
                order = [tf.numpy_function(_then_zero(exchange, bucket), posted, tf.int32, name=f"post_{bucket}")]
    if loss is None:  # a train_step of the user's that does not call scale_loss: nothing to report
        loss = tf.zeros((), dense[-1].dtype)
    # Ranks that wait in the middle of the step must not be waited for here.
    with tf.control_dependencies([*order, *tail()]):
        sums = tf.numpy_function(
            exchange.finish, [loss, *statistics], [tensor.dtype for tensor in (*dense, *statistics)], name="await"
        )
    for tensor, total in zip((*dense, *statistics), sums, strict=True):
        total.set_shape(tensor.shape)
    for variable, value in zip(state.statistics, sums[len(dense) :], strict=True):
        variable.assign(value)
    result: list[Any] = [None] * len(grads)
    for i, total in zip(present, sums, strict=False):
        result[i] = total
    return result


def _then_zero(exchange: Exchange, bucket: int) -> Any:
    """A function of arrays for the graph, which needs a value to order operations by."""

    def post(*gradients: np.ndarray) -> np.int32:
        exchange.post(bucket, *gradients)
        return np.int32(0)

    return post
