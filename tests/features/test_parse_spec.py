"""TensorFlow reads our records with the specification that is derived from the schema, and gets the values back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lockstep.features.examples.sequence_example import encode_sequence_batch
from lockstep.features.parse_spec import decode_parsed, parse_sequence_spec, parse_spec
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from tests.builders.records import encode_batch
from tests.features.examples.test_sequence_example import SCHEMA as SEQUENCES
from tests.features.examples.test_sequence_example import rows as sequence_rows

pytestmark = pytest.mark.slow

DTYPES: dict[str, list[Any]] = {
    "int64": [2**63 - 1, -(2**63), 0],
    "float32": [0.5, -0.0, float("inf")],
    "float64": [0.1, 1e308, 5e-324],
    "uint64": [2**64 - 1, 0, 5],
    "bool": [True, False, True],
    "string": ["é", "", "\U0001f600\0"],
    "bytes": [b"\xff", b"", b"ab"],
}


def test_every_dtype_comes_back_as_scalar_null_list_and_tensor() -> None:
    import tensorflow as tf

    fields = [sample_id_field()]
    columns: dict[str, list[Any]] = {"sample_id": [1, -2, 3]}
    for dtype, values in DTYPES.items():
        fields += [
            Field(name=dtype, dtype=dtype),
            Field(name=f"{dtype}?", dtype=dtype, nullable=True),
            Field(name=f"{dtype}*", dtype=dtype, shape=(None,)),
        ]
        columns |= {dtype: values, f"{dtype}?": [values[0], None, values[2]], f"{dtype}*": [values, [], values[:1]]}
    tensors = {
        dtype: np.arange(18).reshape(3, 2, 3).astype(dtype) for dtype in ("uint8", "float32", "float64", "int64")
    }
    for dtype, array in tensors.items():
        fields.append(Field(name=f"{dtype}#", dtype=dtype, shape=(2, 3)))
        columns[f"{dtype}#"] = [row.tobytes() for row in array]
    schema = Schema(tuple(fields))
    batch = pa.RecordBatch.from_pydict(columns, schema=schema.arrow_schema())
    parsed = decode_parsed(schema, tf.io.parse_example(encode_batch(schema, batch), parse_spec(schema)))
    assert list(parsed) == [field.name for field in schema]
    for dtype, values in DTYPES.items():
        expected = [value.encode() if isinstance(value, str) else value for value in values]
        assert parsed[dtype].dtype == ("string" if dtype in ("string", "bytes") else dtype)
        assert parsed[dtype].numpy().tolist() == expected
        assert parsed[f"{dtype}?"].to_list() == [[expected[0]], [], [expected[2]]]
        assert parsed[f"{dtype}*"].to_list() == [expected, [], expected[:1]]
    for dtype, array in tensors.items():
        np.testing.assert_array_equal(parsed[f"{dtype}#"].numpy(), array)
        assert parsed[f"{dtype}#"].dtype == dtype


def test_sequence_examples_are_read_and_written_to_the_same_bytes() -> None:
    import tensorflow as tf

    batch = sequence_rows()
    records = encode_sequence_batch(SEQUENCES, batch)
    context, lists = parse_sequence_spec(SEQUENCES)
    found = tf.io.parse_sequence_example(records, context, lists)
    parsed = decode_parsed(SEQUENCES, {**found[0], **found[1]})
    for dtype in DTYPES:
        expected = [
            [v.encode() if isinstance(v, str) else v for v in row] for row in batch.column(f"{dtype}s").to_pylist()
        ]
        assert parsed[f"{dtype}s"].to_list() == expected, dtype
    assert parsed["x"].to_list() == [[2.0], [0.1], []] and parsed["t"].numpy().tolist() == [
        [101, 102],
        [97, 98],
        [99, 100],
    ]
    for record in records:
        message = tf.train.SequenceExample.FromString(record)
        assert message.SerializeToString(deterministic=True) == record
