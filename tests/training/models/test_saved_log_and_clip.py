"""Log and clip in a SavedModel's `raw` signature: the bits of the encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.encode.encoder import Encoder
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "encoding", [{"kind": "log", "null_value": -2}, {"kind": "clip", "least": -1.5, "most": 40}, {"kind": "log"}]
)
def test_tensorflow_computes_what_the_encoder_does(encoding: dict[str, Any]) -> None:
    import tensorflow as tf

    from lockstep.training.models.saved_model import _bent

    values = [None, float("nan"), 0.0, -0.5, 3.25, 1e12, -7e5, 40.0, 0.1]
    schema = Schema((sample_id_field(), Field(name="x", dtype="float64", nullable=True, encoding=encoding)))
    ids = pa.array(range(len(values)), pa.int64())
    rows = pa.RecordBatch.from_arrays([ids, pa.array(values, pa.float64())], schema=schema.arrow_schema())
    wanted = Encoder(schema, {}).encode(rows).x["x"]
    null = tf.constant([value is None for value in values])
    given = tf.constant([0.0 if value is None else value for value in values], tf.float64)
    np.testing.assert_allclose(_bent(encoding)(given, null).numpy(), wanted, rtol=1e-7)
