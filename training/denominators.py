"""Losses of a rank's rows, scaled so that their sum over ranks is the loss of the whole global batch.

The exchange multiplies each rank's gradients by n_r / G and adds them: exact for a mean over rows. Keras divides by
other numbers too: by the entries that a mask leaves (`sum_over_batch_size`), by the sum of the weights
(`mean_with_sample_weight`), by nothing (`sum`, `none`, activity regularisers). The global number is reduced in the
forward pass, and the rank's loss multiplied by what makes its part of the sum right. A plain mean costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import apply_mask, reduce_weighted_values
from numpy.typing import NDArray

from storage.errors import ConfigError
from training.ordered import OrderedCalls
from training.swap import swapped

Divides = Literal["rows", "mask", "weights", "nothing"]
LOSS_BASE, KERAS = keras.losses.Loss, "keras."
SUMMED_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
log = logging.getLogger(__name__)


def divides_by(reduction: str | None, *, masked: bool, weighted: bool) -> Divides:
    """What Keras divides the sum of a loss's values by, beyond constants that are equal on all ranks."""
    if reduction in (None, "none", "sum"):
        return "nothing"
    if reduction == "mean_with_sample_weight":
        return "weights" if masked or weighted else "rows"
    return "mask" if masked else "rows"


class Denominators:
    """The losses of one rank. `scale` is n_r / G, by which the exchange multiplies its gradients."""

    def __init__(self, calls: OrderedCalls, scale: float) -> None:
        self._calls, self._scale = calls, scale

    @contextmanager
    def of(self, model: keras.Model) -> Iterator[None]:
        """While a training step of `model` is traced, its losses and activity regularisers are global ones.

        Raises ConfigError for an activity regulariser that is no sum over rows.
        """
        with ExitStack() as stack:
            for layer in model._flatten_layers():
                if getattr(layer, "activity_regularizer", None) is not None:
                    regularizer = self._regularizer(layer)
                    stack.enter_context(swapped(layer, "activity_regularizer", regularizer))
            losses = model._compile_loss
            if losses is not None and losses.built:
                wrapped = [entry._replace(loss=self._loss(entry.loss)) for entry in losses._flat_losses]
                stack.enter_context(swapped(losses, "_flat_losses", wrapped))
            yield

    def _regularizer(self, layer: Any) -> Any:
        regularizer = layer.activity_regularizer
        if type(regularizer) not in SUMMED_REGULARIZERS:
            raise ConfigError(
                f"the activity regulariser of the layer {layer.name} cannot be split over ranks",
                got=type(regularizer).__name__,
                allowed="L1, L2 and L1L2, which are sums over rows",
                next_step="Use one of these, or compute it as a loss of an output, which is a mean over rows.",
            )
        return lambda output: regularizer(output) / self._scale

    def _loss(self, loss: Any) -> Any:
        def of_all(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return self._global(loss, y_true, y_pred, sample_weight)

        return of_all

    def _global(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """The loss of this rank's rows as Keras computes it, times this rank's correction."""
        if type(loss).__call__ is not LOSS_BASE.__call__:
            return self._unknown(loss, loss(y_true, y_pred, sample_weight), y_pred, sample_weight)
        mask = keras.src.backend.get_keras_mask(y_pred)
        with tf.name_scope(loss.name):
            y_pred, y_true = (
                keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y)
                for y in (y_pred, y_true)
            )
            values = loss.call(y_true, y_pred)
            of_values = keras.src.backend.get_keras_mask(values)
            if of_values is not None:
                mask = of_values if mask is None else mask & of_values
            local = reduce_weighted_values(values, sample_weight, mask, loss.reduction, loss.dtype)
            if len(values.shape) == 0:
                return self._unknown(loss, local, y_pred, sample_weight)
            divides = divides_by(loss.reduction, masked=mask is not None, weighted=sample_weight is not None)
            if divides == "rows":
                return local
            if divides == "nothing":
                factor = 1.0 / self._scale
                # `none` leaves one value a row, whose gradients Keras adds; their mean is what it reports.
                return local * factor if loss.reduction == "sum" else _gradient_times(local, factor)
            if divides == "mask":
                valid = tf.reduce_sum(tf.cast(mask, tf.float64))
                return self._corrected(local, valid, tf.cast(tf.size(mask), tf.float64), loss.name)
            weights = apply_mask(sample_weight, mask, dtype=loss.dtype, reduction=loss.reduction)
            total = tf.reduce_sum(tf.cast(weights, tf.float64))
            return self._corrected(local, total, tf.constant(self._scale, tf.float64), loss.name)

    def _corrected(self, local: Any, part: Any, share: Any, name: str) -> Any:
        """local * (part / sum of parts) / (share / sum of shares); 0 where no rank has a part."""

        def correction(part: NDArray[np.float64], share: NDArray[np.float64]) -> np.float64:
            both = np.array([part, share])
            self._calls.communicator.all_reduce(both)
            if both[0] == 0 or share == 0:
                return np.float64(0)
            return np.float64((part / both[0]) / (share / both[1]))

        (factor,) = self._calls.call(correction, [part, share], [tf.float64], f"the loss {name}")
        factor.set_shape(())
        return local * tf.cast(factor, local.dtype)

    def _unknown(self, loss: Any, local: Any, y_pred: Any, sample_weight: Any) -> Any:
        """A loss that makes one number of its rows by itself. Taken for a mean over rows where it may be one."""
        function = getattr(loss, "fn", loss)
        module = getattr(function, "__module__", "") if function is not loss else type(loss).__module__
        masked = any(keras.src.backend.get_keras_mask(y) is not None for y in keras.tree.flatten(y_pred))
        if module.startswith(KERAS) or masked or sample_weight is not None:
            raise ConfigError(
                f"the loss {loss.name} cannot be split over ranks",
                got="one number for a whole batch"
                + (", with a mask or sample weights" if not module.startswith(KERAS) else ""),
                allowed="one value a row (for Dice and Tversky an `axis` that leaves out the rows'), "
                "without a mask and weights a mean over rows",
                next_step="Return one value a row from `call` and leave the reduction to Keras.",
            )
        log.warning("the loss %s returns one number: it is taken for a mean over its rows", loss.name)
        return local


def _gradient_times(value: Any, factor: float) -> Any:
    """`value` itself, whose gradient is multiplied by `factor`."""
    scaled = value * factor
    return scaled + tf.stop_gradient(value - scaled)
