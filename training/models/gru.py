"""A GRU over a sequence of ids: Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", 2016."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import Signature
from training.models import ModelOptions
from training.models.inputs import ids_of, inputs_of, sequence_of
from training.models.outputs import CLASSES, NUMBER, YES_NO, compile_for, label_of, output_of
from training.models.ready import settings_of

LEARNING_RATE = 0.005


def gru(signature: Signature, options: ModelOptions) -> keras.Model:
    """A vector of each id, one gated recurrent layer, and the output from its last state.

    One input is used, (n, length) ids with padding (0) at the end; label classes such as the next page, yes or no, or a
    number. Raises ConfigError for a dataset without such a column, or with several if `--set sequence` names none.
    """
    label = label_of("gru", signature, CLASSES, YES_NO, NUMBER)
    chosen, inputs = settings_of("gru", options.extra), inputs_of(signature)
    name = sequence_of("gru", signature, chosen["sequence"])
    table = keras.layers.Embedding(ids_of(signature)[name], chosen["embedding"], mask_zero=True, name="_vectors")
    x = keras.layers.GRU(chosen["width"], name="_gru")(table(inputs[name]))
    x = keras.layers.Dropout(chosen["dropout"], name="_dropout")(x)
    model = keras.Model(inputs, output_of(x, label, signature), name="gru")
    return compile_for(
        model, label, signature, keras.optimizers.Adam(options.learning_rate or LEARNING_RATE), hits=True
    )
