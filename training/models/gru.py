"""A GRU over a sequence of ids: Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", 2016."""

from __future__ import annotations

import keras

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import ids_of, inputs_of, last_of, pairs_of, sequence_of
from lockstep.training.models.outputs import CLASSES, NUMBER, YES_NO, compile_for, label_of, output_of, units_of
from lockstep.training.models.ready import settings_of

# Next page (conf/next_page.toml), hit@10 less that of a table of pairs on splits by visitor of its training rows, one
# seed: 0.007 after 10 epochs, 0.001 without the pairs; with Keras' first values, a rate of 0.005 and neither pairs nor
# the last id's vector at best -0.007 (two other splits).
LEARNING_RATE, WEIGHT_DECAY = 0.003, 0.1


def gru(signature: Signature, options: ModelOptions) -> keras.Model:
    """A vector of each id, one gated recurrent layer, and the output from its last state and the last id's vector.

    One input is used, (n, length) ids with padding (0) at the end; label classes such as the next page, yes or no, or a
    number. Raises ConfigError for a dataset without such a column, or with several if `--set sequence` names none.
    """
    label = label_of("gru", signature, CLASSES, YES_NO, NUMBER)
    chosen, inputs = settings_of("gru", options.extra), inputs_of(signature)
    name = sequence_of("gru", signature, chosen["sequence"])
    # Large first values distinguish ids from the first step on; most ids are too rare to be learned in a few steps.
    table = keras.layers.Embedding(
        ids_of(signature)[name],
        chosen["embedding"],
        embeddings_initializer=keras.initializers.RandomUniform(-1, 1),
        mask_zero=True,
        name="_vectors",
    )
    found = table(inputs[name])
    state = keras.layers.GRU(chosen["width"], name="_gru")(found)
    x = keras.layers.Concatenate(name="_joined")([state, last_of(found, inputs[name])])
    x = keras.layers.Dropout(chosen["dropout"], name="_dropout")(x)
    pairs = pairs_of(inputs[name], ids_of(signature)[name], units_of(label, signature))
    model = keras.Model(inputs, output_of(x, label, signature, more=pairs), name="gru")
    adam = keras.optimizers.AdamW(options.learning_rate or LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return compile_for(model, label, signature, adam, hits=True)
