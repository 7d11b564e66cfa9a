"""The two models of benchmarks.train_step, for Keras 3 and for tf_keras alike, and one batch for each."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH_ROWS = {"resnet20": 64, "dense": 128}
DENSE_UNITS, DENSE_LAYERS = 2048, 6
CLASSES = 10


def batch(name: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch of random content, another on each rank: x float32, y int64 (n,)."""
    rng = np.random.default_rng(rank)
    rows = BATCH_ROWS[name]
    shape = (rows, 32, 32, 3) if name == "resnet20" else (rows, DENSE_UNITS)
    return rng.standard_normal(shape, dtype=np.float32), rng.integers(0, CLASSES, rows)


def build(keras: Any, name: str) -> Any:
    """The model `name`, compiled; `keras` is the module `keras` or `tf_keras`."""
    model = _resnet20(keras) if name == "resnet20" else _dense(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    return model


def _dense(keras: Any) -> Any:
    """Six layers of 2,048: 23 M parameters (25 M with biases and the last layer)."""
    inputs = x = keras.Input((DENSE_UNITS,))
    for _ in range(DENSE_LAYERS):
        x = keras.layers.Dense(DENSE_UNITS, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def _resnet20(keras: Any) -> Any:
    """ResNet-20 of He and others (2016) on 32 x 32 x 3 with plain batch normalisation."""
    layers = keras.layers

    def conv(x: Any, filters: int, stride: int, size: int = 3) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(conv(inputs, 16, 1))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = conv(layers.ReLU()(conv(x, filters, stride)), filters, 1)
            shortcut = x if stride == 1 else conv(x, filters, stride, 1)
            x = layers.ReLU()(layers.Add()([shortcut, y]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
