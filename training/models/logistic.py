"""Logistic regression over all features of a table."""

from __future__ import annotations

import math
from typing import Any

import keras

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from training.models import ModelOptions

# The demo's web log (9,702 rows, global batch 128), exact test AUC after 6 epochs, two seeds: 0.001 0.709 and 0.710,
# 0.003 0.712 and 0.712, 0.01 0.703 and 0.704 (it overfits), 0.03 0.687 and 0.695; each +- 0.025 (95 %).
LEARNING_RATE = 0.003
# Thresholds of the AUC in training, in log-odds from -12 to 12, denser around 0, where a model begins: 0.04 apart
# there, 0.2 at -6. Keras' own are evenly spaced probabilities, which hardly separate rows if positive ones are rare.
THRESHOLDS = [1 / (1 + math.exp(-12 * math.sinh(3 * (2 * n / 197 - 1)) / math.sinh(3))) for n in range(198)]


def logistic(signature: Signature, options: ModelOptions) -> keras.Model:
    """Sigmoid of a weighted sum; inputs by name, any shapes; label (n,) float32 0 or 1. Weights begin at zero.

    Each number or column has a weight. Each id has a weight, all in one table, except id 0: the same model as one-hot
    columns, without the columns. Raises ConfigError unless the label is yes or no.
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
    ids = {name: spec.ids for name, spec in signature.features.items() if spec.ids is not None}
    numbers = [_flat(tensor) for name, tensor in inputs.items() if name not in ids]
    joined = keras.layers.Concatenate()(numbers) if len(numbers) > 1 else (numbers or [None])[0]
    if ids:
        parts = [_sum_of_ids({name: inputs[name] for name in ids}, ids)]
        if joined is not None:
            parts.append(keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="_numbers")(joined))
        logit = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
        output = keras.layers.Activation("sigmoid", name="probability", dtype=keras.config.floatx())(logit)
    else:
        last = keras.layers.Dense(
            1, activation="sigmoid", kernel_initializer="zeros", name="probability", dtype=keras.config.floatx()
        )
        output = last(joined)
    model = keras.Model(inputs, output, name="logistic")
    model.compile(
        optimizer=keras.optimizers.Adam(options.learning_rate or LEARNING_RATE),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[
            keras.metrics.AUC(name="auc", thresholds=THRESHOLDS),
            keras.metrics.BinaryAccuracy(name="accuracy"),
            keras.metrics.R2Score(name="r2"),
        ],
        jit_compile=False,
    )
    return model


def _flat(tensor: Any) -> Any:
    """(n, ...) -> (n, size) in floats, so that features of any shape can be joined."""
    flat = keras.layers.Reshape((math.prod(tensor.shape[1:]),))(tensor)
    return flat if "float" in tensor.dtype else keras.ops.cast(flat, keras.config.floatx())


def _sum_of_ids(tensors: dict[str, Any], sizes: dict[str, int]) -> Any:
    """The sum of the weights of all ids of a row, and of a bias that all rows have: (n, k) int64 each -> (n, 1)."""
    indices, counted, start = [], [], 0
    for name, tensor in tensors.items():
        indices.append(tensor + start)
        counted.append(keras.ops.cast(tensor > 0, keras.config.floatx()))
        start += sizes[name]
    always = keras.ops.zeros_like(indices[0][:, :1]) + start
    indices.append(always)
    counted.append(keras.ops.cast(always > 0, keras.config.floatx()))
    table = keras.layers.Embedding(start + 1, 1, embeddings_initializer="zeros", name="_ids")
    # No field can have the name `_ids`: an input and a layer must not share one.
    weights = keras.ops.squeeze(table(keras.ops.concatenate(indices, axis=1)), axis=-1)  # (n, k, 1) -> (n, k)
    return keras.ops.sum(weights * keras.ops.concatenate(counted, axis=1), axis=1, keepdims=True)
