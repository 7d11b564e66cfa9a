"""The encodings as TensorFlow computes them, and the columns that it cannot encode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.encode.encoder import Encoder
from lockstep.features.encode.hashing import hash_values
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Moments
from lockstep.features.schema.schema import Schema

pytestmark = pytest.mark.slow


def test_the_hash_is_xxh64() -> None:
    import tensorflow as tf

    from training.models.saved_model import xxh64

    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in [*range(140), 997]]  # each tail, stripes
    numbers = rng.integers(-(2**63), 2**63 - 1, 50)
    for seed in (0, 42, 2**63 - 1):
        found = tf.function(lambda values, seed=seed: xxh64(values, seed))(tf.constant(texts))
        np.testing.assert_array_equal(found, hash_values(pa.array(texts, pa.binary()), seed))
        np.testing.assert_array_equal(xxh64(tf.constant(numbers), seed), hash_values(pa.array(numbers), seed))
    assert xxh64(tf.constant([], tf.string), 0).shape == (0,)


def test_columns_that_tensorflow_cannot_encode_are_named_and_constants_are_zero(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    from training.models.saved_model import export_saved_model

    def exported(*fields: Field, fitted: dict[str, Moments]) -> tuple[str, dict[str, str]]:
        schema = Schema((sample_id_field(), *fields))
        signature = Encoder(schema, fitted).signature
        inputs = {
            name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()
        }
        model = keras.Model(
            inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="_sum")(inputs["x"])
        )
        folder = str(tmp_path / fields[0].name)
        return folder, export_saved_model(model, folder, signature, schema, fitted)[1]

    x = Field(name="x", dtype="float32", encoding={"kind": "standardise", "file": "x.json"})
    moments = {"x": Moments(name="x", count=9, mean=1e6, variance=0.0, fitted_on=("train",))}
    folder, reasons = exported(x, fitted=moments)
    assert reasons == {}
    raw = tf.saved_model.load(folder).signatures["raw"]
    found = raw(x=tf.constant([1e6, np.nan, 1e6 + 0.0625, 2e6], tf.float32))["prediction"].numpy()
    np.testing.assert_array_equal(found, [[0], [0], [0], [1e6]])  # a constant's last bits count for nothing
    of = {"kind": "hash", "buckets": 9, "seed": 0}
    names = Field(name="names", dtype="string", shape=(None,), encoding={"kind": "sequence", "length": 2, "of": of})
    folder, reasons = exported(names, x, Field(name="n", dtype="uint64"), fitted=moments)
    assert reasons == {
        name: f"a TensorFlow signature cannot take {what}" for name, what in (("names", "a list"), ("n", "uint64"))
    }
    assert list(tf.saved_model.load(folder).signatures) == ["serving_default"]
