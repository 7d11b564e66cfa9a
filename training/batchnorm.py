"""Batch normalisation over lane groups: the same statistics at any number of ranks, without communication.

"Ghost" batches are from Hoffer, Hubara and Soudry, "Train longer, generalize better" (2017).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from storage.errors import ConfigError


@keras.saving.register_keras_serializable("lockstep")
class GhostBatchNormalization(keras.layers.BatchNormalization):
    """Keras' BatchNormalization, its batch statistics taken over each run of `group_rows` rows by itself.

    Rows of a lane group lie together in a batch, and a rank has whole groups, so a sample is normalised alike at any
    number of ranks. The moving averages take the mean over this rank's groups; `training.distribute` makes it the mean
    over all groups after each step. A batch in training must be a multiple of `group_rows`.
    """

    def __init__(self, group_rows: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if group_rows < 1 or self.renorm or self.synchronized:
            raise ConfigError(
                "GhostBatchNormalization cannot be made so",
                got=f"group_rows={group_rows}, renorm={self.renorm}, synchronized={self.synchronized}",
                allowed="group_rows from 1 up, without renorm or synchronized",
                next_step="Use keras.layers.BatchNormalization for these.",
            )
        self.group_rows = group_rows

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """inputs (n, ..., channels) -> the same shape and dtype; in training n is a multiple of group_rows."""
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        rows = inputs.shape[0]
        if mask is not None or (rows is not None and rows % self.group_rows):
            raise ValueError(
                f"{self.name} needs batches of whole groups of {self.group_rows} rows without a mask, "
                f"got {rows} rows{'' if mask is None else ' and a mask'}"
            )
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
        """Towards the mean over this rank's groups; value (groups, 1, ..., channels)."""
        channels = moving.shape[0]
        mean = ops.mean(ops.reshape(value, (-1, channels)), axis=0)
        old = ops.cast(moving, mean.dtype)
        moving.assign(old * self.momentum + mean * (1.0 - self.momentum))

    def get_config(self) -> dict[str, Any]:
        """Keras' own and group_rows."""
        return {**super().get_config(), "group_rows": self.group_rows}


def statistics_of(model: keras.Model) -> list[keras.Variable]:
    """The moving averages of all trainable batch normalisations: what ranks must agree on after each step."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable for layer in layers if layer.trainable for variable in (layer.moving_mean, layer.moving_variance)]
