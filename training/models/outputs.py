"""Turns the label of a signature into the last layer, the loss and the metrics of the ready models."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras.config import floatx

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError

YES_NO, CLASSES, NUMBER = "yes or no", "classes", "a number"
DECLARED = {
    YES_NO: "a bool",
    CLASSES: "an int64 with num_classes",
    NUMBER: "a float32, or an int64 without num_classes",
}
# Thresholds of the AUC in training, in log-odds from -12 to 12, denser around 0, where a model begins: 0.04 apart
# there, 0.2 at -6. Keras' own are evenly spaced probabilities, which hardly separate rows if positive ones are rare.
THRESHOLDS = [1 / (1 + math.exp(-12 * math.sinh(3 * (2 * n / 197 - 1)) / math.sinh(3))) for n in range(198)]
HITS = 10
NAMED = {YES_NO: ("probability", "sigmoid"), CLASSES: ("classes", "softmax"), NUMBER: ("number", None)}
"""The name and activation of the last layer."""


def label_of(model: str, signature: Signature, *allowed: str) -> str:
    """YES_NO, CLASSES or NUMBER. Raises ConfigError unless it is one of those `allowed`."""
    label, found = signature.label, "no label"
    if label is not None:
        found = CLASSES if signature.num_classes else NUMBER if signature.label_is_number else YES_NO
    if found not in allowed:
        raise ConfigError(
            f"the model {model} does not take this label",
            got=found,
            allowed="; or ".join(f"{kind} ({DECLARED[kind]})" for kind in allowed),
            next_step="Declare the label so in the schema, or choose another of the models that lockstep models lists.",
        )
    return found


def output_of(x: Any, label: str, signature: Signature, *, more: Any = None) -> Any:
    """The last layer over (n, k): a probability (n, 1), one of each class (n, classes), or a number (n, 1).

    It has the digits of floatx: probabilities and loss need more than layers in mixed precision have. `more`, of the
    output's shape, is added before the activation.
    """
    name, activation = NAMED[label]
    if more is None:
        return keras.layers.Dense(units_of(label, signature), activation=activation, name=name, dtype=floatx())(x)
    x = keras.layers.Dense(units_of(label, signature), name="_scores", dtype=floatx())(x)
    x = keras.layers.Add(name="_sum", dtype=floatx())([x, more])
    return keras.layers.Activation(activation, name=name, dtype=floatx())(x)


def units_of(label: str, signature: Signature) -> int:
    """The width of the output: the number of classes, or 1."""
    return (signature.num_classes or 1) if label == CLASSES else 1


def compile_for(
    model: keras.Model, label: str, signature: Signature, optimizer: keras.optimizers.Optimizer, *, hits: bool = False
) -> keras.Model:
    """Compile the model with the loss and metrics of its label (n,), or (n, classes) float32 where mixup makes shares
    of classes. `hits` adds hit@10, the share of rows whose class is among the ten most probable; not in float64.
    """
    loss, metrics = _loss_and_metrics(label, signature)
    # TensorFlow finds the ten largest of float32 only.
    if hits and label == CLASSES and (signature.num_classes or 0) > HITS and floatx() == "float32":
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(HITS, name=f"hit@{HITS}"))
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics, jit_compile=False)
    return model


def _loss_and_metrics(label: str, signature: Signature) -> tuple[Any, list[Any]]:
    losses, metrics = keras.losses, keras.metrics
    if label == YES_NO:
        auc = metrics.AUC(name="auc", thresholds=THRESHOLDS)
        return losses.BinaryCrossentropy(), [auc, metrics.BinaryAccuracy(name="accuracy"), metrics.R2Score(name="r2")]
    if label == NUMBER:
        return losses.MeanSquaredError(), [metrics.RootMeanSquaredError(name="rmse"), metrics.R2Score(name="r2")]
    if signature.label is not None and signature.label.shape:
        return losses.CategoricalCrossentropy(), [metrics.CategoricalAccuracy(name="accuracy")]
    return losses.SparseCategoricalCrossentropy(), [metrics.SparseCategoricalAccuracy(name="accuracy")]
