"""Vectors of users and items: matrix factorisation with biases (Koren, Bell and Volinsky, "Matrix Factorization
Techniques for Recommender Systems", 2009), and retrieval with the negatives of a batch (Hidasi et al., "Session-based
Recommendations with Recurrent Neural Networks", 2016)."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.config import floatx

from lockstep.features.schema.signature import Signature
from lockstep.storage.errors import ConfigError
from lockstep.training.models import ModelOptions
from lockstep.training.models.inputs import (
    Sharding,
    column_of,
    ids_and_any_of,
    inputs_of,
    scope_name,
    table_of,
    vectors,
)
from lockstep.training.models.outputs import NAMED, NUMBER, YES_NO, compile_for, label_of
from lockstep.training.models.ready import settings_of
from lockstep.training.steps.over_ranks import gather_from

LEARNING_RATE = 0.003
START = keras.initializers.RandomNormal(stddev=0.05)


class InBatch(keras.layers.Dot):
    """The product of a user's and an item's vector: (n, k) each -> (n, 1). Adds the loss of retrieval: the
    cross-entropy of each row's item among the items of the global batch. An export has Keras' Dot in its place.
    """

    def call(self, inputs: Any) -> Any:
        """(n, 1)."""
        user, item = (ops.cast(one, floatx()) for one in inputs)
        items, first = gather_from(item)
        mine = ops.arange(ops.shape(user)[0], dtype="int64") + first
        scores = ops.matmul(user, ops.transpose(items))  # (n, k) by (k, N of all ranks)
        self.add_loss(ops.mean(keras.losses.sparse_categorical_crossentropy(mine, scores, from_logits=True)))
        return super().call(inputs)


def two_tower(signature: Signature, options: ModelOptions) -> keras.Model:
    """The product of a user's and an item's vector, plus a bias of each and one of all: (n, 1).

    Inputs by name, of which two are used, (n, 1) ids each; label a number such as a rating, or yes or no (the sigmoid).
    A user or item that is unknown (id 0) has neither vector nor bias. Raises ConfigError for another label, and if
    there are not two such columns and `--set user=COLUMN --set item=COLUMN` do not name them.

    With `--set loss=in_batch` there are no biases; each row is an item that a user chose, whatever its label, and the
    items of the global batch's other rows are those that it did not (InBatch). Weights of rows are refused.
    """
    label = label_of("two-tower", signature, NUMBER, YES_NO)
    chosen = settings_of("two-tower", options.extra)
    ids, retrieval = ids_and_any_of(signature, chosen), chosen["loss"] == "in_batch"
    candidates = [name for name in ids if signature.features[name].shape == (1,)]
    pair = _pair(candidates, chosen["user"], chosen["item"], either=not retrieval)
    inputs, decay, sharding = inputs_of(signature), chosen["decay"], Sharding.of(options, chosen)
    towers = []
    for name in pair:
        table = table_of(f"_{scope_name(name)}_vector", ids[name], chosen["embedding"], decay, START, sharding)
        towers.append(vectors(inputs[name], table)[:, 0])
    if retrieval:
        score = InBatch(axes=1, name="_score", dtype=floatx())(towers)
    else:
        bias = keras.layers.Embedding(1, 1, embeddings_initializer="zeros", name="_bias")
        score = bias(ops.zeros_like(inputs[pair[0]][:, 0]))
        for name in pair:
            biases = table_of(f"_{scope_name(name)}_bias", ids[name], 1, decay, "zeros", sharding)
            score = score + vectors(inputs[name], biases)[:, 0]
        score = score + ops.sum(towers[0] * towers[1], axis=1, keepdims=True)
    name, activation = NAMED[label]
    output = keras.layers.Activation(activation or "linear", name=name, dtype=floatx())(score)
    model = keras.Model(inputs, output, name="two_tower")
    adam = keras.optimizers.Adam(options.learning_rate or LEARNING_RATE)
    if not retrieval:
        return compile_for(model, label, signature, adam)
    if signature.weight is not None:
        raise ConfigError(
            "the loss in_batch takes no weights of rows",
            got="a dataset with a field of kind weight",
            allowed="rows that count alike",
            next_step="Write the dataset without --weights, or leave out --set loss=in_batch.",
        )
    model.compile(adam, jit_compile=False)
    return model


def _pair(candidates: list[str], user: str, item: str, *, either: bool) -> tuple[str, str]:
    """The columns of users and items: those named, or with `either` the only two, in byte order. Raises ConfigError."""
    if either and not user and not item and len(candidates) == 2:  # the model is the same if they change places
        user, item = candidates
    kind = "a column of one id a row (hash or vocabulary with output = index, or in --set any_ids)"
    user = column_of("two-tower", "user", user, [name for name in candidates if name != item], kind)
    return user, column_of("two-tower", "item", item, [name for name in candidates if name != user], kind)
