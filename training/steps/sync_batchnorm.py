"""Batch statistics over the rows of all ranks, differentiable: N ranks normalise as one would.

Forward: each rank's count, mean and sum of squared deviations of each channel are gathered and merged in rank order by
Chan, Golub and LeVeque's formula ("Updating formulae and a pairwise algorithm for computing sample variances", 1979):
one message a layer, and sound where the mean is large. Backward: the gradients of mean and variance are summed.
"""

from __future__ import annotations

from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from training.steps.ordered import OrderedCalls

Array = NDArray[np.float64]


class SyncMoments:
    """Mean and variance of a batch normalisation's input over all ranks.

    `scale` is n_r / G, by which the exchange multiplies this rank's gradients afterwards: what other ranks' losses ask
    of this rank's rows is divided by it first. Ranks may have different numbers of rows.
    """

    def __init__(self, calls: OrderedCalls, scale: float) -> None:
        self._calls, self._scale = calls, scale

    def moments(self, x: tf.Tensor, axes: list[int], mask: tf.Tensor | None, who: str) -> tuple[tf.Tensor, tf.Tensor]:
        """x (n, ..., channels) float32 or float64, `axes` all but the channels', mask as x without its last axis.

        Returns mean and variance (channels,) of x's dtype. With a mask the divisor is count + keras.epsilon, as in
        Keras' own layer. Raises ConfigError for a gradient of a gradient.
        """
        (channel,) = set(range(len(x.shape))) - {axis % len(x.shape) for axis in axes}
        weights = None if mask is None else tf.broadcast_to(tf.cast(mask, x.dtype)[..., tf.newaxis], tf.shape(x))
        epsilon = 0.0 if mask is None else keras.config.epsilon()
        ones = [1] * len(x.shape)
        ones[channel] = -1

        @tf.custom_gradient
        def of_all(x: tf.Tensor) -> Any:
            mean, variance, divisor, shift = self._forward(x, axes, weights, ones, epsilon, who)

            def gradient(d_mean: tf.Tensor, d_variance: tf.Tensor) -> tf.Tensor:
                d_mean, d_variance = self._backward(d_mean, d_variance, who)
                d_mean = (d_mean - 2 * d_variance * shift / divisor) / divisor
                deviation = x - tf.reshape(mean, ones)
                dx = tf.reshape(d_mean, ones) + tf.reshape(2 * d_variance / divisor, ones) * deviation
                return dx if weights is None else dx * weights

            return (mean, variance), gradient

        return cast(tuple[tf.Tensor, tf.Tensor], of_all(x))

    def _forward(
        self, x: tf.Tensor, axes: list[int], weights: tf.Tensor | None, ones: list[int], epsilon: float, who: str
    ) -> list[tf.Tensor]:
        if weights is None:
            channels = tf.shape(x)[ones.index(-1)]
            count = tf.fill([channels], tf.cast(tf.size(x) // channels, x.dtype))
            mean = tf.reduce_mean(x, axes)
            squares = tf.reduce_sum(tf.math.squared_difference(x, tf.reshape(mean, ones)), axes)
        else:
            count = tf.reduce_sum(weights, axes)
            mean = tf.math.divide_no_nan(tf.reduce_sum(x * weights, axes), count)
            squares = tf.reduce_sum(weights * tf.math.squared_difference(x, tf.reshape(mean, ones)), axes)
        flat = tf.cast(tf.concat([count, mean, squares], 0), tf.float64)

        def gather(mine: Array) -> Array:
            return merged(self._calls.communicator.all_gather(mine), epsilon)

        (rows,) = self._calls.call(gather, [flat], [tf.float64], who)
        rows.set_shape((4, x.shape[ones.index(-1)]))
        return [tf.cast(row, x.dtype) for row in tf.unstack(rows, num=4)]

    def _backward(self, d_mean: tf.Tensor, d_variance: tf.Tensor, who: str) -> tuple[tf.Tensor, tf.Tensor]:
        @tf.custom_gradient
        def summed(flat: tf.Tensor) -> Any:
            def refuse(*_: Any) -> Any:
                raise ConfigError(
                    f"{who} has no second derivative over ranks",
                    got="a gradient of a gradient, as of a gradient penalty",
                    allowed="first derivatives with --batchnorm sync",
                    next_step="Use --batchnorm ghost or local, or another normalisation.",
                )

            (total,) = self._calls.call(self._sum, [flat], [tf.float64], who)
            total.set_shape(flat.shape)
            return total, refuse

        total = summed(tf.cast(tf.concat([d_mean, d_variance], 0), tf.float64) * self._scale)
        total = tf.cast(total / self._scale, d_mean.dtype)
        return cast(tuple[tf.Tensor, tf.Tensor], tuple(tf.split(total, 2)))

    def _sum(self, mine: Array) -> Array:
        total = mine.copy()  # TensorFlow's memory is not ours to write to
        self._calls.communicator.all_reduce(total)
        return total


def merged(gathered: Array, epsilon: float = 0.0) -> Array:
    """Each rank's (count, mean, sum of squared deviations) as those of all rows.

    gathered (num_ranks, 3 * channels) -> (4, channels): mean, variance, the divisor count + epsilon of both, and
    the sum of deviations from that mean, zero but for epsilon. Channels without a row have mean and variance 0.
    """
    counts, means, squares = np.moveaxis(gathered.reshape(len(gathered), 3, -1), 1, 0)  # (num_ranks, channels) each
    count = counts.sum(axis=0)
    divisor = np.where(count + epsilon > 0, count + epsilon, 1.0)
    with np.errstate(all="ignore"):  # what is not finite is found in the gradients
        total = (counts * means).sum(axis=0)
        mean = total / divisor
        true_mean = total / np.where(count > 0, count, 1.0)
        squares = (squares + counts * np.square(means - true_mean)).sum(axis=0)
        variance = (squares + count * np.square(true_mean - mean)) / divisor
        return np.stack([mean, variance, divisor, count * (true_mean - mean)])
