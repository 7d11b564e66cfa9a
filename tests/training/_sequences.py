"""A small dataset of sequences of ids and their next one, for transformers and pairs of dense layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pyarrow as pa

from lockstep.features.sample_id import sample_id
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.features.schema.signature import Signature
from lockstep.training.models import ModelOptions
from tests.training._models import FailOnce
from tests.training._tiny import write_rows

IDS, LENGTH = 9, 6
SCHEMA = Schema(
    (
        Field(name="sample_id", dtype="int64", kind="id"),
        Field(
            name="path", dtype="int64", shape=(None,),
            encoding={
                "kind": "sequence", "length": LENGTH, "keep": "last",
                "of": {"kind": "hash", "buckets": IDS, "seed": 1},
            },
        ),
        Field(name="label", dtype="int64", kind="label", num_classes=4),
    )
)  # fmt: skip


def write_sequences(root: object, records: dict[str, int], seed: int = 0) -> None:
    """Write rows of 1 to 8 ids; the class follows from the last two."""
    rng = np.random.default_rng(seed)
    rows = sum(records.values())
    paths = [rng.integers(0, IDS, rng.integers(1, LENGTH + 3)).tolist() for _ in range(rows)]
    labels = [(path[-1] + path[max(0, len(path) - 2)]) % 4 for path in paths]
    ids = [sample_id([str(row).encode()], 0) for row in range(rows)]
    columns = [pa.array(ids), pa.array(paths, pa.list_(pa.int64())), pa.array(labels, pa.int64())]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow_schema())
    write_rows(str(root), SCHEMA, batch, records, "tfrecord", 2, 16, seed)


def pair(signature: Signature, options: ModelOptions) -> tuple[keras.Model, list[Any]]:
    """A table, columns and rows with an activation between, dropout before and batch normalisation after them, and a
    rank that fails when a test says so.
    """
    layers = keras.layers
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()}
    x = layers.Embedding(signature.features["path"].ids, 5, name="ids")(inputs["path"])
    x = x * keras.ops.expand_dims(keras.ops.cast(inputs["path_mask"], x.dtype), -1)
    x = layers.Dropout(0.3, name="before")(layers.Flatten(name="flat")(x))
    x = layers.Dense(7, name="wide")(x)
    x = layers.Activation("tanh", name="between")(x)
    x = layers.Dense(6, activation="relu", name="narrow")(x)
    x = layers.BatchNormalization(name="norm")(x)
    model = keras.Model(inputs, layers.Dense(4, activation="softmax", name="classes")(x), name="pair")
    model.parallel_layers = {"ids": "table", "wide": "columns", "narrow": "rows"}
    metrics = ["accuracy"]
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=metrics, jit_compile=False)
    return model, [FailOnce()]
