"""Batch normalisation on ranks: over lane groups (ghost), over all ranks (sync) or over each rank's rows (local).

"Ghost" batches are from Hoffer, Hubara and Soudry, "Train longer, generalize better" (2017): the same statistics at any
number of ranks, without communication. `batchnorm_as` switches a model's own BatchNormalization layers to one of them.
docs/decisions/041-keras-on-ranks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from lockstep.training.steps.fused import Normalised, can_fuse_batchnorm, normalise
from lockstep.training.steps.ordered import OrderedCalls
from lockstep.training.steps.patching import swapped_class

Array = NDArray[np.float64]
PLAIN = keras.layers.BatchNormalization


class SyncMoments:
    """Mean and variance of a batch normalisation's input over all ranks.

    `scale` is n_r / G, by which the exchange multiplies this rank's gradients afterwards: the gradients that come from
    other ranks' losses are divided by it first. Ranks may have different numbers of rows.
    """

    def __init__(self, calls: OrderedCalls, scale: float) -> None:
        self._calls, self._scale = calls, scale

    def moments(self, x: tf.Tensor, axes: list[int], mask: tf.Tensor | None, who: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute moments of x (n, ..., channels) float32 or float64, `axes` all but the channels', mask like x without
        its last axis.

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

        (rows,) = self._calls.call_in_step(gather, [flat], [tf.float64], who)
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

            (total,) = self._calls.call_in_step(self._sum, [flat], [tf.float64], who)
            total.set_shape(flat.shape)
            return total, refuse

        total = summed(tf.cast(tf.concat([d_mean, d_variance], 0), tf.float64) * self._scale)
        total = tf.cast(total / self._scale, d_mean.dtype)
        return cast(tuple[tf.Tensor, tf.Tensor], tuple(tf.split(total, 2)))

    def _sum(self, mine: Array) -> Array:
        total = mine.copy()  # this memory is TensorFlow's
        self._calls.communicator.all_reduce(total)
        return total


def merged(gathered: Array, epsilon: float = 0.0) -> Array:
    """Merge each rank's (count, mean, sum of squared deviations) into the moments of all rows.

    gathered (num_ranks, 3 * channels) -> (4, channels): mean, variance, the divisor count + epsilon of both, and
    the sum of deviations from that mean, zero if epsilon is. Channels without a row have mean and variance 0.
    """
    counts, means, squares = np.moveaxis(gathered.reshape(len(gathered), 3, -1), 1, 0)  # (num_ranks, channels) each
    count = counts.sum(axis=0)
    divisor = np.where(count + epsilon > 0, count + epsilon, 1.0)
    with np.errstate(all="ignore"):  # the check of the gradients finds values that are not finite
        total = (counts * means).sum(axis=0)
        mean = total / divisor
        true_mean = total / np.where(count > 0, count, 1.0)
        squares = (squares + counts * np.square(means - true_mean)).sum(axis=0)
        variance = (squares + count * np.square(true_mean - mean)) / divisor
        return np.stack([mean, variance, divisor, count * (true_mean - mean)])


class _Fused(keras.layers.BatchNormalization):
    """Mixed in before a layer's own class: the same over the whole batch, in one operation if TensorFlow has one."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalise inputs (n, ..., channels) into the same shape and dtype."""
        if not training or not self.trainable or not can_fuse_batchnorm(self, inputs, mask):
            return super().call(inputs, training=training, mask=mask)
        return self._moved(normalise(self, inputs, inputs.shape[0]))

    def _moved(self, normalised: Normalised) -> Any:
        """Update the moving averages with its statistics, and return its result."""
        for moving, value in ((self.moving_mean, normalised.mean), (self.moving_variance, normalised.variance)):
            moving.assign(moving * self.momentum + value * (1.0 - self.momentum))
        return normalised.y


class _Ghost(_Fused):
    """Mixed in before a layer's own class: separate batch statistics for each run of `group_rows` rows."""

    group_rows: int

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalise inputs (n, ..., channels) into the same shape and dtype; in training group_rows divides n."""
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        rows = inputs.shape[0]
        if mask is not None or (rows is not None and rows % self.group_rows):
            raise ConfigError(
                f"{self.name} needs batches of whole groups of {self.group_rows} rows without a mask",
                got=f"{rows} rows{'' if mask is None else ' and a mask'}",
                allowed=f"multiples of {self.group_rows} rows",
                next_step="Use --batchnorm sync.",
            )
        if can_fuse_batchnorm(self, inputs, mask):
            return self._moved(normalise(self, inputs, self.group_rows))
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        shape = ops.shape(x)
        x = ops.reshape(x, (-1, self.group_rows, *shape[1:]))  # (groups, group_rows, ..., channels)
        channel = self.axis % len(inputs.shape) + 1
        axes = [axis for axis in range(1, len(x.shape)) if axis != channel]
        mean, variance = ops.moments(x, axes=axes, keepdims=True)  # (groups, 1, ..., channels)
        self._move(self.moving_mean, mean)
        self._move(self.moving_variance, variance)
        factor = ops.rsqrt(variance + self.epsilon)
        broadcast = [1] * len(x.shape)
        broadcast[channel] = -1
        if self.scale:
            factor = factor * ops.reshape(ops.cast(self.gamma, x.dtype), broadcast)
        offset = -mean * factor
        if self.center:
            offset = offset + ops.reshape(ops.cast(self.beta, x.dtype), broadcast)
        return ops.cast(ops.reshape(x * factor + offset, shape), self.compute_dtype)

    def _move(self, moving: keras.Variable, value: Any) -> None:
        """Move an average towards the mean over this rank's groups; value (groups, 1, ..., channels)."""
        channels = moving.shape[0]
        mean = ops.mean(ops.reshape(value, (-1, channels)), axis=0)
        old = ops.cast(moving, mean.dtype)
        moving.assign(old * self.momentum + mean * (1.0 - self.momentum))


@keras.saving.register_keras_serializable("lockstep")
class GhostBatchNormalization(_Ghost):
    """Keras' BatchNormalization with separate batch statistics for each run of `group_rows` rows.

    The rows of a lane group are neighbours in a batch, and a rank has whole groups, so a sample is normalised the same
    way at any number of ranks. The moving averages take the mean over this rank's groups;
    `lockstep.training.steps.distribute` turns it into the mean over all groups after each step. A batch in training
    must be a multiple of `group_rows`.
    """

    def __init__(self, group_rows: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if group_rows < 1 or self.renorm or self.synchronized:
            raise ConfigError(
                "GhostBatchNormalization got invalid arguments",
                got=f"group_rows={group_rows}, renorm={self.renorm}, synchronized={self.synchronized}",
                allowed="group_rows from 1 up, without renorm or synchronized",
                next_step="Use keras.layers.BatchNormalization for these.",
            )
        self.group_rows = group_rows

    def get_config(self) -> dict[str, Any]:
        """Return Keras' own configuration with group_rows."""
        return {**super().get_config(), "group_rows": self.group_rows}


class _Sync(keras.layers.BatchNormalization):
    """Mixed in before a layer's own class: mean and variance over all ranks' rows."""

    _of_ranks: SyncMoments

    def _moments(self, inputs: Any, mask: Any) -> Any:
        return self._of_ranks.moments(inputs, self._reduction_axes, mask, f"the layer {self.name}")


@contextmanager
def batchnorm_as(
    model: keras.Model, *, group_rows: int | None = None, of_ranks: SyncMoments | None = None
) -> Iterator[None]:
    """While this is open, the model's own BatchNormalization layers, nested ones too, are `ghost` or `sync`.

    With neither argument their results stay the same, to rounding. Variables, names and saved models stay Keras' own:
    only the class of a layer changes, and only while a step is traced. GhostBatchNormalization layers stay as they are.
    Raises ConfigError naming a layer that computes batch statistics by code of its own.
    """
    with ExitStack() as stack:
        for layer in normalisations(model):
            if isinstance(layer, GhostBatchNormalization):
                continue
            if group_rows is None and of_ranks is None:
                if type(layer) is PLAIN:
                    stack.enter_context(swapped_class(layer, _Fused))
                continue
            _check(layer, ghost=of_ranks is None)
            mixin: type = _Ghost if of_ranks is None else _Sync
            stack.enter_context(swapped_class(layer, mixin, group_rows=group_rows, _of_ranks=of_ranks))
        yield


def normalisations(model: keras.Model) -> list[Any]:
    """All batch normalisation layers of a model, also nested ones, which Keras' public `layers` omits."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, PLAIN)]


def _check(layer: Any, *, ghost: bool) -> None:
    own = [name for name in ("call", "_moments") if getattr(type(layer), name) is not getattr(PLAIN, name)]
    if ghost and (layer.renorm or layer.synchronized):
        own.append("renorm" if layer.renorm else "synchronized")
    if "_moments" in own or (ghost and own):
        raise ConfigError(
            f"the layer {layer.name} ({type(layer).__name__}) computes its batch statistics by code of its own",
            got=f"{', '.join(own)} of its own",
            allowed="keras.layers.BatchNormalization" + (" without renorm or synchronized" if ghost else ""),
            next_step=f"Use {'--batchnorm sync or ' if ghost and '_moments' not in own else ''}--batchnorm local.",
        )


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """The moving averages of all trainable batch normalisations, which ranks average after each step."""
    layers = [layer for layer in normalisations(model) if layer.trainable]
    found = [variable for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]
    renorms = [layer for layer in layers if layer.renorm]
    return found + [v for layer in renorms for v in (layer.moving_stddev, layer.renorm_mean, layer.renorm_stddev)]
