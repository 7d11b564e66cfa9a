"""One operation of TensorFlow for one variable's update, or for a batch normalisation, where TensorFlow has one.

Keras 3 builds an update from a handful of operations, each of which reads the whole variable and most of which allocate
a new tensor; TensorFlow's kernel passes over it once or twice (docs/decisions/041-keras-on-ranks.md). The optimizer's
variables, and Keras' work before and after the update, stay the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from lockstep.training.steps.optimizers import CorrectedSGD

# Exactly these: a subclass may have changed the update.
_SGD = (keras.optimizers.SGD, CorrectedSGD)
_ADAM = (keras.optimizers.Adam, keras.optimizers.AdamW)


def can_fuse_update(plain: type, optimizer: Any, gradient: Any, variable: Any) -> bool:
    """Whether TensorFlow has a kernel for this update; `plain` is the optimizer's own class.

    It has one for Keras' SGD, Adam and AdamW without amsgrad, if the gradient is a whole tensor of the variable's
    shape, both of float32 or both of float64.
    """
    known = plain in _SGD or (plain in _ADAM and not optimizer.amsgrad)
    if not known or not isinstance(gradient, tf.Tensor) or not isinstance(variable, tf.Variable):
        return False
    # Keras would broadcast. Only a part of a variable (lockstep.training.strategies.zero) has no known length.
    fits = gradient.shape.is_fully_defined() and gradient.shape.is_compatible_with(variable.shape)
    return bool(fits and gradient.dtype == variable.dtype and variable.dtype in (tf.float32, tf.float64))


def update(optimizer: Any, gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any) -> None:
    """The update of `optimizer.update_step`, equal to rounding, where `can_fuse_update`."""
    index = optimizer._get_variable_index(variable)
    rate = ops.cast(learning_rate, variable.dtype)
    if isinstance(optimizer, keras.optimizers.SGD):
        _descend(optimizer, index, gradient, variable, rate)
    else:
        _adapt(optimizer, index, gradient, variable, rate)


def _descend(optimizer: Any, index: int, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=optimizer.momentums[index].value.handle,
        lr=rate,
        grad=gradient,
        momentum=ops.cast(optimizer.momentum, variable.dtype),
        use_nesterov=bool(optimizer.nesterov),
    )


def _adapt(optimizer: Any, index: int, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
    dtype, betas = variable.dtype, (optimizer.beta_1, optimizer.beta_2)
    step = ops.cast(optimizer.iterations + 1, dtype)
    # Like Keras: `cast` rounds a number to float32 first, but only the powers are computed from that.
    power1, power2 = (ops.power(ops.cast(beta, dtype), step) for beta in betas)
    beta1, beta2, epsilon = (ops.convert_to_tensor(number, dtype) for number in (*betas, optimizer.epsilon))
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=optimizer._momentums[index].value.handle,
        v=optimizer._velocities[index].value.handle,
        beta1_power=power1,
        beta2_power=power2,
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,  # added to the root, as in Keras
        grad=gradient,
    )


class Normalised(NamedTuple):
    """`y` has the shape and dtype of the batch; `mean` and `variance` (channels,) float32 are means over the groups."""

    y: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def can_fuse_batchnorm(layer: Any, inputs: tf.Tensor, mask: Any) -> bool:
    """Whether TensorFlow's kernel can compute `layer` (keras.layers.BatchNormalization) in training.

    It can for float32 (n, height, width, channels) of known sizes, channels last, without mask and renorm.
    """
    shape = inputs.shape
    fits = len(shape) == 4 and None not in shape and math.prod(shape) > 0 and layer.axis in (-1, 3)
    plain = mask is None and not layer.renorm and not layer.synchronized
    return bool(fits and plain and inputs.dtype == layer.variable_dtype == layer.compute_dtype == "float32")


def normalise(layer: Any, x: tf.Tensor, group_rows: int) -> Normalised:
    """Normalise each run of `group_rows` rows of `x` separately; n is a multiple of `group_rows`."""
    channels = x.shape[-1]
    gamma = layer.gamma.value if layer.scale else tf.ones(channels)
    beta = layer.beta.value if layer.center else tf.zeros(channels)
    groups = x.shape[0] // group_rows
    parts = [
        tf.compat.v1.nn.fused_batch_norm(part, gamma, beta, epsilon=layer.epsilon, is_training=True)[:3]
        for part in (tf.split(x, groups) if groups > 1 else [x])
    ]
    ys, means, variances = zip(*parts, strict=True)
    # The kernel returns the unbiased variance; Keras' moving average takes the batch's own.
    count = group_rows * math.prod(x.shape[1:3])
    variance = tf.add_n(variances) * ((count - 1) / count / groups)
    return Normalised(tf.concat(ys, 0) if groups > 1 else ys[0], tf.add_n(means) / groups, variance)
