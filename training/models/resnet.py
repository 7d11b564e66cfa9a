"""The CIFAR ResNet of 6n + 2 layers: He, Zhang, Ren and Sun, "Deep Residual Learning", section 4.2 (2016)."""

from __future__ import annotations

from typing import Any

import keras

from lockstep.features.schema.signature import DATASET, Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import inputs_of, penalty_of
from lockstep.training.models.outputs import CLASSES, compile_for
from lockstep.training.models.ready import settings_of
from lockstep.training.models.tasks import model_of
from lockstep.training.steps.batchnorm import GhostBatchNormalization

# Fashion-MNIST, 10,000 images, global batch 128, 2 epochs, ghost of 16 rows, one seed, accuracy on 2,000 test images:
# SGD 0.1 with warm-up and cosine 0.861, 0.2 0.860; constant SGD 0.05 0.804; Adam 1e-3 0.839, 3e-3 with cosine 0.852.
# The default on 2 ranks, seeds 0 to 4: 0.8615, 0.8630, 0.8555, 0.8635, 0.8595.
LEARNING_RATE = 0.1  # at its peak, for a global batch of 128; grows with the batch (Goyal et al., 2017)
WARM_UP = 0.2  # of the run
MOMENTUM = 0.9  # of the moving averages: two epochs of a small set are too few steps for Keras' 0.99


def resnet(signature: Signature, options: ModelOptions, *, depth: int) -> keras.Model:
    """Three stages of `(depth - 2) / 6` blocks with 16, 32 and 64 filters, projections between stages.

    One input (n, height, width, channels), any size and channels: integers 0..255, which are scaled to 0..1, or floats,
    which are used unchanged, since their schema normalises them; label (n,) int64 in 0..num_classes-1, or
    (n, num_classes) float32 if mixup makes shares of classes.
    Raises ConfigError for other signatures.
    """
    (name, image), *others = [pair for pair in signature.features.items() if pair[0] != DATASET]
    label = signature.label
    if others or len(image.shape) != 3 or label is None or not signature.num_classes:
        raise ConfigError(
            f"the model resnet{depth} needs one image and one class",
            got=f"features {', '.join(f'{key} {s.shape}' for key, s in signature.features.items())}, label {label}",
            allowed="one feature (height, width, channels) and an int64 label with num_classes",
            next_step="Build the dataset with lockstep etl_images, or use another model.",
        )
    chosen = settings_of(f"resnet{depth}", options.extra)
    penalty = penalty_of(chosen["decay"])
    inputs = inputs_of(signature)
    pixels = inputs[name]
    x = pixels if "float" in image.dtype else keras.layers.Rescaling(1.0 / 255.0)(pixels)
    x = _activated(_conv(x, 16, 1, penalty), options)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            x = _block(x, filters, 2 if stage and not block else 1, penalty, options)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = model_of(inputs, x, CLASSES, signature, options, f"resnet{depth}")
    optimizer = keras.optimizers.SGD(_schedule(options), momentum=0.9, nesterov=chosen["nesterov"])
    return compile_for(model, CLASSES, signature, optimizer)


def _schedule(options: ModelOptions) -> keras.optimizers.schedules.LearningRateSchedule:
    """Linear warm-up, then half a cosine down to zero at the run's last step."""
    peak = options.learning_rate or LEARNING_RATE * options.global_batch / 128
    warm_up = int(options.steps * WARM_UP)
    return keras.optimizers.schedules.CosineDecay(
        peak / 10 if warm_up else peak,
        max(1, options.steps - warm_up),
        warmup_target=peak if warm_up else None,
        warmup_steps=warm_up,
    )


def _block(x: Any, filters: int, stride: int, penalty: Any, options: ModelOptions) -> Any:
    # Option B of the paper where the shape changes: a 1x1 convolution.
    shortcut = x if stride == 1 else _conv(x, filters, stride, penalty, size=1)
    y = _activated(_conv(x, filters, stride, penalty), options)
    y = _normalised(_conv(y, filters, 1, penalty), options)
    return keras.layers.ReLU()(keras.layers.Add()([shortcut, y]))


def _activated(x: Any, options: ModelOptions) -> Any:
    return keras.layers.ReLU()(_normalised(x, options))


def _normalised(x: Any, options: ModelOptions) -> Any:
    if options.group_rows is None:
        return keras.layers.BatchNormalization(momentum=MOMENTUM)(x)
    return GhostBatchNormalization(options.group_rows, momentum=MOMENTUM)(x)


def _conv(x: Any, filters: int, stride: int, penalty: Any, size: int = 3) -> Any:
    return keras.layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=penalty,
    )(x)
