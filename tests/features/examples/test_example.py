"""The tf.Example codec: its inverse, TensorFlow as the judge of its bytes, and what it refuses."""

from __future__ import annotations

import math
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.examples import decode_batch
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from tests.builders.records import encode_batch, encode_example

FIELDS = (
    sample_id_field(),
    Field(name="answer", dtype="bool", kind="label"),
    Field(name="int", dtype="int64", nullable=True, encoding={"kind": "bucketise", "boundaries": [0]}),
    Field(name="many_ints", dtype="int64", shape=(None,)),
    Field(name="real", dtype="float32"),
    Field(name="many_reals", dtype="float32", shape=(None,)),
    Field(name="wide", dtype="float64"),
    Field(name="text", dtype="string", nullable=True),
    Field(name="words", dtype="string", shape=(None,)),
    Field(name="blob", dtype="bytes"),
    Field(name="pixels", dtype="uint8", shape=(2, 3, 1)),
)
SCHEMA = Schema(FIELDS)

int64 = st.integers(-(2**63), 2**63 - 1)
float32 = st.floats(width=32, allow_nan=False)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
ROWS = st.fixed_dictionaries(
    {
        "sample_id": int64,
        "answer": st.booleans(),
        "int": st.none() | int64,
        "many_ints": st.lists(int64, max_size=5),
        "real": float32,
        "many_reals": st.lists(float32, max_size=5),
        "wide": st.floats(allow_nan=False),
        "text": st.none() | text,
        "words": st.lists(text, max_size=4),
        "blob": st.binary(max_size=300),
        "pixels": st.binary(min_size=6, max_size=6),
    }
)
ROW: dict[str, Any] = {
    "sample_id": -(2**63),
    "answer": True,
    "int": None,
    "many_ints": [],
    "real": -0.0,
    "many_reals": [1.5],
    "wide": 0.1,
    "text": "é" * 100,
    "words": ["", "a"],
    "blob": b"\xff\x00",
    "pixels": b"abcdef",
}


def batch_of(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA.arrow_schema())


@given(st.lists(ROWS, max_size=4))
@settings(max_examples=150, deadline=None)
def test_decode_undoes_encode(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(*rows)
    decoded = decode_batch(SCHEMA, encode_batch(SCHEMA, batch))
    assert decoded.schema.equals(SCHEMA.arrow_schema())
    assert decoded.to_pylist() == batch.to_pylist()


def test_signs_of_zero_and_nan_survive() -> None:
    rows = [{**ROW, "real": value} for value in (0.0, -0.0, math.nan)]
    found = decode_batch(SCHEMA, encode_batch(SCHEMA, batch_of(*rows))).column("real").to_pylist()
    assert math.copysign(1, found[0]) == 1 and math.copysign(1, found[1]) == -1 and math.isnan(found[2])


def test_a_views_bytes_decode_like_bytes() -> None:
    record = encode_example(SCHEMA, ROW)
    assert decode_batch(SCHEMA, [memoryview(record)]).to_pylist() == [ROW]


def test_the_bytes_of_a_small_example_are_these() -> None:
    schema = Schema((sample_id_field(), Field(name="a", dtype="int64", shape=(None,))))
    empty = b"\x0a\x07" + b"\x0a\x01a" + b"\x12\x02" + b"\x1a\x00"  # entry, name, feature, int64 list of nothing
    one = b"\x0a\x12" + b"\x0a\x09sample_id" + b"\x12\x05" + b"\x1a\x03" + b"\x0a\x01\x01"
    assert encode_example(schema, {"sample_id": 1, "a": []}) == b"\x0a\x1d" + empty + one


@pytest.mark.slow
def test_tensorflow_writes_and_reads_the_same() -> None:
    import tensorflow as tf

    rows = [ROW, {**ROW, "int": 2**63 - 1, "text": None, "many_ints": [0, -1, 300], "answer": False}]
    for row, record in zip(rows, encode_batch(SCHEMA, batch_of(*rows)), strict=True):
        example = tf.train.Example()
        feature = example.features.feature
        for field in SCHEMA:
            value = row[field.name]
            if value is None:
                continue
            values = value if field.is_list else [value]
            if field.dtype in ("int64", "bool"):
                feature[field.name].int64_list.SetInParent()
                feature[field.name].int64_list.value.extend(map(int, values))
            elif field.dtype == "float32":
                feature[field.name].float_list.SetInParent()
                feature[field.name].float_list.value.extend(values)
            else:
                feature[field.name].bytes_list.SetInParent()
                feature[field.name].bytes_list.value.extend(as_bytes(value) for value in values)
        assert tf.train.Example.FromString(record) == example
        assert record == example.SerializeToString(deterministic=True)  # no name here begins another


def as_bytes(value: Any) -> bytes:
    if isinstance(value, float):
        return struct.pack("<d", value)
    return value.encode() if isinstance(value, str) else value


def test_a_null_where_none_may_be_is_refused() -> None:
    with pytest.raises(DataError, match="`real` is null"):
        encode_batch(SCHEMA, batch_of({**ROW, "real": None}))
    with pytest.raises(DataError, match="null inside a list"):
        encode_batch(SCHEMA, batch_of({**ROW, "many_ints": [1, None]}))


def test_a_tensor_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(DataError, match="wrong length"):
        encode_batch(SCHEMA, batch_of({**ROW, "pixels": b"abc"}))


def test_every_cut_and_any_extra_byte_is_refused() -> None:
    record = encode_example(SCHEMA, ROW)
    for length in range(len(record)):
        with pytest.raises(DataError, match="record 0"):
            decode_batch(SCHEMA, [record[:length]])
    with pytest.raises(DataError):
        decode_batch(SCHEMA, [record + b"\x00"])


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_noise_is_a_data_error(noise: bytes) -> None:
    with pytest.raises(DataError):
        decode_batch(SCHEMA, [noise])


def test_a_flipped_byte_never_ends_in_another_error() -> None:
    record = bytearray(encode_example(SCHEMA, ROW))
    refused = 0
    for at in range(len(record)):
        changed = bytes(record[:at]) + bytes([record[at] ^ 0x80]) + bytes(record[at + 1 :])
        try:
            decode_batch(SCHEMA, [changed])
        except DataError:
            refused += 1
    assert 0 < refused < len(record)  # tags and lengths are refused; a flip inside a value is another value


def test_other_fields_than_the_schemas_are_refused() -> None:
    fewer = Schema(FIELDS[:-1])
    with pytest.raises(DataError):
        decode_batch(fewer, [encode_example(SCHEMA, ROW)])
    with pytest.raises(DataError, match="no such feature"):
        decode_batch(SCHEMA, [encode_example(fewer, {k: v for k, v in ROW.items() if k != "pixels"})])


def test_a_list_of_another_type_is_refused() -> None:
    reals, blobs = (
        Schema((sample_id_field(), Field(name="a", dtype=dtype, shape=(None,)))) for dtype in ("float32", "bytes")
    )
    record = encode_example(blobs, {"sample_id": 1, "a": [b"\x00\x00\x80\x3f"]})  # the same body as one packed float
    assert decode_batch(blobs, [record]).num_rows == 1
    with pytest.raises(DataError, match="field `a`"):
        decode_batch(reals, [record])
