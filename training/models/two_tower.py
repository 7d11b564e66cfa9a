"""Matrix factorisation with biases: Koren, Bell and Volinsky, "Matrix Factorization Techniques for Recommender
Systems" (2009)."""

from __future__ import annotations

import keras
from keras import ops

from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import Sharding, column_of, ids_and_any_of, inputs_of, table_of, vectors
from lockstep.training.models.outputs import NAMED, NUMBER, YES_NO, compile_for, label_of
from lockstep.training.models.ready import settings_of

LEARNING_RATE = 0.003
START = keras.initializers.RandomNormal(stddev=0.05)


def two_tower(signature: Signature, options: ModelOptions) -> keras.Model:
    """The product of a user's and an item's vector, plus a bias of each and one of all: (n, 1).

    Inputs by name, of which two are used, (n, 1) ids each; label a number such as a rating, or yes or no (the sigmoid).
    A user or item that is unknown (id 0) has neither vector nor bias. Raises ConfigError for another label, and if
    there are not two such columns and `--set user=COLUMN --set item=COLUMN` do not name them.
    """
    label = label_of("two-tower", signature, NUMBER, YES_NO)
    chosen = settings_of("two-tower", options.extra)
    ids = ids_and_any_of(signature, chosen)
    pair = _pair([name for name in ids if signature.features[name].shape == (1,)], chosen["user"], chosen["item"])
    inputs, decay, sharding = inputs_of(signature), chosen["decay"], Sharding.of(options, chosen)
    bias = keras.layers.Embedding(1, 1, embeddings_initializer="zeros", name="_bias")
    score, towers = bias(ops.zeros_like(inputs[pair[0]][:, 0])), []
    for name in pair:
        biases = table_of(f"_{name}_bias", ids[name], 1, decay, "zeros", sharding)
        score = score + vectors(inputs[name], biases)[:, 0]
        table = table_of(f"_{name}_vector", ids[name], chosen["embedding"], decay, START, sharding)
        towers.append(vectors(inputs[name], table)[:, 0])
    score = score + ops.sum(towers[0] * towers[1], axis=1, keepdims=True)
    name, activation = NAMED[label]
    output = keras.layers.Activation(activation or "linear", name=name, dtype=keras.config.floatx())(score)
    adam = keras.optimizers.Adam(options.learning_rate or LEARNING_RATE)
    return compile_for(keras.Model(inputs, output, name="two_tower"), label, signature, adam)


def _pair(candidates: list[str], user: str, item: str) -> tuple[str, str]:
    """The columns of users and items: those named, or the only two, in byte order. Raises ConfigError."""
    if not user and not item and len(candidates) == 2:  # the model is the same if they change places
        user, item = candidates
    kind = "a column of one id a row (hash or vocabulary with output = index, or in --set any_ids)"
    user = column_of("two-tower", "user", user, [name for name in candidates if name != item], kind)
    return user, column_of("two-tower", "item", item, [name for name in candidates if name != user], kind)
