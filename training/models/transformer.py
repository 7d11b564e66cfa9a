"""A small transformer over a sequence of ids: Vaswani et al., "Attention Is All You Need" (2017), on the last positions
as Kang and McAuley, "Self-Attentive Sequential Recommendation" (2018)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import ids_of, inputs_of, last_of, pairs_of, sequence_of
from lockstep.training.models.outputs import CLASSES, NUMBER, YES_NO, compile_for, label_of, output_of, units_of
from lockstep.training.models.ready import settings_of

LEARNING_RATE = 0.003


def transformer(signature: Signature, options: ModelOptions) -> keras.Model:
    """Vectors of ids and of their places, blocks of self-attention; the output from the last place and the last id.

    One input is used, (n, length) ids with padding (0) at the end; label classes such as the next page, yes or no, or a
    number. Raises ConfigError for a dataset without such a column, or with several if `--set sequence` names none.
    """
    label = label_of("transformer", signature, CLASSES, YES_NO, NUMBER)
    chosen, inputs = settings_of("transformer", options.extra), inputs_of(signature)
    name = sequence_of("transformer", signature, chosen["sequence"])
    ids, width, (length,) = inputs[name], chosen["width"], signature.features[name].shape
    there = ids > 0
    # Places count from the end: 1 is the last id of a row, 0 is padding.
    count = ops.sum(ops.cast(there, "int64"), axis=1, keepdims=True)
    place = ops.maximum(count - np.arange(length), 0)
    # Large first values, as in gru, distinguish ids from the first step on.
    start = keras.initializers.RandomUniform(-1, 1)
    found = keras.layers.Embedding(ids_of(signature)[name], width, embeddings_initializer=start, name="_vectors")(ids)
    x = found + keras.layers.Embedding(length + 1, width, name="_places")(place)
    x = keras.layers.Dropout(chosen["dropout"], name="_dropout")(x)
    for block in range(chosen["layers"]):
        x = _block(x, ops.expand_dims(there, 1), f"_{block}", chosen)
    x = keras.layers.LayerNormalization(name="_norm")(x)
    x = keras.layers.Concatenate(name="_joined")([last_of(x, ids), last_of(found, ids)])
    x = keras.layers.Dropout(chosen["dropout"], name="_dropout_last")(x)
    pairs = pairs_of(ids, ids_of(signature)[name], units_of(label, signature))
    model = keras.Model(inputs, output_of(x, label, signature, more=pairs), name="transformer")
    model.parallel_layers = {"_vectors": "table"}
    for block in range(chosen["layers"]):
        kinds = {"attention": "heads", "wide": "columns", "narrow": "rows"}
        model.parallel_layers |= {f"_{block}_{layer}": kind for layer, kind in kinds.items()}
    return compile_for(
        model, label, signature, keras.optimizers.Adam(options.learning_rate or LEARNING_RATE), hits=True
    )


def _block(x: Any, mask: Any, name: str, chosen: dict[str, Any]) -> Any:
    """Attention and dense layers, each added to its input (n, length, width); `mask` (n, 1, length) hides padding."""
    layers, width, dropout = keras.layers, chosen["width"], chosen["dropout"]
    y = layers.LayerNormalization(name=f"{name}_norm")(x)
    heads = layers.MultiHeadAttention(chosen["heads"], max(1, width // chosen["heads"]), name=f"{name}_attention")
    x = x + layers.Dropout(dropout, name=f"{name}_dropout")(heads(y, y, attention_mask=mask))
    y = layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_wide")(y)
    y = layers.Dense(width, name=f"{name}_narrow")(y)
    return x + layers.Dropout(dropout, name=f"{name}_dropout2")(y)
