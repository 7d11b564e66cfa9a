"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016)."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import Sharding, dense_layers, embedded, ids_and_any_of, inputs_of, weighted_sum
from lockstep.training.models.outputs import NAMED, NUMBER, YES_NO, compile_for, label_of
from lockstep.training.models.ready import settings_of

LEARNING_RATE = 0.001


def wide_deep(signature: Signature, options: ModelOptions) -> keras.Model:
    """A weighted sum of all features (wide) plus dense layers over vectors of ids and numbers (deep), trained as one.

    Inputs by name, any shapes; label yes or no, or a number. The paper trains the wide part by FTRL and the deep one by
    AdaGrad, here Adam trains both. Crossed columns are the dataset's: a query that joins two texts, and `hash`.
    """
    label = label_of("wide-deep", signature, YES_NO, NUMBER)
    chosen, inputs = settings_of("wide-deep", options.extra), inputs_of(signature)
    ids, decay, sharding = ids_and_any_of(signature, chosen), chosen["decay"], Sharding.of(options, chosen)
    wide = weighted_sum(inputs, ids, name="_wide", activation=None, decay=decay, sharding=sharding)
    deep = dense_layers(embedded(inputs, ids, chosen["embedding"], decay, sharding), chosen)
    floatx = keras.config.floatx()
    total = keras.layers.Add(name="_sum", dtype=floatx)(
        [wide, keras.layers.Dense(1, use_bias=False, name="_deep", dtype=floatx)(deep)]
    )
    name, activation = NAMED[label]
    output = keras.layers.Activation(activation or "linear", name=name, dtype=floatx)(total)
    adam = keras.optimizers.Adam(options.learning_rate or LEARNING_RATE)
    return compile_for(keras.Model(inputs, output, name="wide_deep"), label, signature, adam)
