"""What layers keep for the backward pass, against a count by hand."""

from __future__ import annotations

from functools import partial

import keras
import pytest

from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.training.rank.model_size import kept_bytes


def signature(*shape: int) -> Signature:
    of = partial(TensorSpec, dtype="float32")
    return Signature(features={"x": of(shape=shape)}, label=of(shape=(1,)), num_classes=None)


@pytest.mark.parametrize("rows", [1, 256])
def test_dense_layers_keep_what_relu_returns_and_normalisation_its_input_too(rows: int) -> None:
    x = keras.Input((64,), name="x")
    hidden = x
    for _ in range(3):
        hidden = keras.layers.Dense(32, activation="relu")(hidden)
    dense = keras.Model({"x": x}, keras.layers.Dense(1)(hidden))
    assert kept_bytes(dense, signature(64), rows) == rows * 3 * 32 * 4

    image = keras.Input((8, 8, 3), name="x")
    planes = image
    for _ in range(2):
        planes = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(planes)
        planes = keras.layers.ReLU()(keras.layers.BatchNormalization()(planes))
    convolutions = keras.Model({"x": image}, keras.layers.GlobalAveragePooling2D()(planes))
    each, found = rows * 8 * 8 * 4 * 4, kept_bytes(convolutions, signature(8, 8, 3), rows)
    assert 4 * each <= found <= 6 * each + 4096, "outputs of convolutions and of relu, and of the normalisation"
