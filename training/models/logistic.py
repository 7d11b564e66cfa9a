"""Logistic regression over all features of a table: Cox, "The Regression Analysis of Binary Sequences" (1958)."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import ids_of, inputs_of, weighted_sum
from lockstep.training.models.outputs import YES_NO, compile_for
from lockstep.training.models.ready import settings_of

# The demo's web log (9,702 rows, global batch 128), exact test AUC after 6 epochs, two seeds: 0.001 0.709 and 0.710,
# 0.003 0.712 and 0.712, 0.01 0.703 and 0.704 (it overfits), 0.03 0.687 and 0.695; each +- 0.025 (95 %).
LEARNING_RATE = 0.003


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
    inputs, decay = inputs_of(signature), settings_of("logistic", options.extra)["decay"]
    output = weighted_sum(inputs, ids_of(signature), name="probability", activation="sigmoid", decay=decay)
    adam = keras.optimizers.Adam(options.learning_rate or LEARNING_RATE)
    return compile_for(keras.Model(inputs, output, name="logistic"), YES_NO, signature, adam)
