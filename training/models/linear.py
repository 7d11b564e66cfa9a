"""Linear regression over all features of a table, by least squares: Legendre (1805), Gauss (1809)."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import ids_of, inputs_of, weighted_sum
from lockstep.training.models.outputs import NUMBER, compile_for, label_of
from lockstep.training.models.ready import settings_of

LEARNING_RATE = 0.01


def linear(signature: Signature, options: ModelOptions) -> keras.Model:
    """A weighted sum of all features and a bias; inputs by name, any shapes; label (n,) a number.

    Weights begin at zero, and Adam moves each by about its learning rate a step: a label of thousands wants a larger
    rate, or to be divided in the query that makes it. Raises ConfigError unless the label is a number.
    """
    label = label_of("linear", signature, NUMBER)
    inputs, decay = inputs_of(signature), settings_of("linear", options.extra)["decay"]
    output = weighted_sum(inputs, ids_of(signature), name="number", activation=None, decay=decay)
    adam = keras.optimizers.Adam(options.learning_rate or LEARNING_RATE)
    return compile_for(keras.Model(inputs, output, name="linear"), label, signature, adam)
