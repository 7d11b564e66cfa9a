"""The decoder kernel: what the encoder wrote comes back, and damage ends as it does in the plain decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.examples import decode_batch
from lockstep.features.examples.codec import RecordDecoder, RecordEncoder
from lockstep.features.examples.example import sized
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats.tfrecord import frame, record_offsets
from tests.builders.records import encode_batch
from tests.features.examples.test_encoder import tables
from tests.features.examples.test_example import FIELDS, ROW, SCHEMA, batch_of


def fast(schema: Schema, data: bytes, columns: list[str] | None = None) -> pa.RecordBatch:
    """What the kernel alone makes of a buffer: that it leaves nothing to the plain decoder is what is tested."""
    raw = np.frombuffer(data, dtype=np.uint8)
    found = RecordDecoder(schema, columns)._fast(raw, record_offsets(raw, file="f"))
    assert found is not None
    return found


def bits(batch: pa.RecordBatch) -> list[Any]:
    """The rows with floats as text, so that NaN equals NaN and 0.0 does not equal -0.0."""
    return [{name: repr(value) for name, value in row.items()} for row in batch.to_pylist()]


@given(tables())
@settings(max_examples=150, deadline=None)
def test_what_was_encoded_comes_back(table: tuple[Schema, pa.RecordBatch]) -> None:
    schema, batch = table
    data = RecordEncoder(schema).encode(batch)[0].tobytes()
    found = fast(schema, data)
    found.validate(full=True)
    assert found.schema.equals(schema.arrow_schema())
    assert bits(found) == bits(batch.select(found.schema.names).cast(found.schema))
    some = schema.arrow_schema().names[::2]
    assert fast(schema, data, some).equals(found.select(some)) or bits(found.select(some)) == bits(
        fast(schema, data, some)
    )


def test_more_rows_than_a_block() -> None:
    rows = [{**ROW, "int": None if n % 9 == 0 else n << (n % 50), "words": ["w" * n] * (n % 3)} for n in range(200)]
    data = RecordEncoder(SCHEMA).encode(batch_of(*rows))[0].tobytes()
    assert fast(SCHEMA, data).to_pylist() == rows


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_changed_records_are_taken_or_refused_as_by_the_plain_decoder(draw: st.DataObject) -> None:
    """Bytes that are framed rightly, but are another Example or none: a byte changed, cut out or put in."""
    records = encode_batch(SCHEMA, batch_of(ROW, {**ROW, "int": -5, "text": None, "many_ints": [1, 2**40]}))
    record = bytearray(records[draw.draw(st.integers(0, 1))])
    for _ in range(draw.draw(st.integers(1, 2))):
        at, byte = draw.draw(st.integers(0, len(record) - 1)), draw.draw(st.integers(0, 255))
        change = draw.draw(st.sampled_from(["set", "cut", "put"]))
        if change == "set":
            record[at] = byte
        elif change == "put":
            record.insert(at, byte)
        else:
            del record[at]
    changed = [records[0], bytes(record)]
    data = b"".join(map(frame, changed))
    try:
        expected = decode_batch(SCHEMA, changed)
    except DataError as error:
        with pytest.raises(DataError) as caught:
            RecordDecoder(SCHEMA).decode(data, file="f")
        assert str(caught.value) == str(error)
    else:
        assert bits(RecordDecoder(SCHEMA).decode(data, file="f")) == bits(expected)


@pytest.mark.parametrize("number", [b"\x80\0", b"\xff" * 7 + b"\0", b"\xff" * 8 + b"\0", b"\x81" * 9 + b"\0"])
def test_a_number_of_more_bytes_than_it_takes_is_refused(number: bytes) -> None:
    """Else one row had several records, and several digests."""
    for shape in ((), (None,)):
        schema = Schema((sample_id_field(), Field(name="a", dtype="int64", shape=shape)))
        own = encode_batch(schema, pa.RecordBatch.from_pydict({"sample_id": [1], "a": [[5]] if shape else [5]}))[0]
        feature = sized(0x12, sized(0x1A, sized(0x0A, number)))
        record = sized(0x0A, sized(0x0A, b"\x0a\x01a" + feature) + own[own.index(b"\x0a\x12\x0a\x09sample_id") :])
        assert own[own.index(b"\x0a\x01a") :].startswith(b"\x0a\x01a\x12\x05\x1a\x03\x0a\x01\x05")
        with pytest.raises(DataError, match="field `a`"):
            RecordDecoder(schema).decode(frame(record), file="f")


def test_a_schema_with_other_fields_is_refused() -> None:
    data = RecordEncoder(SCHEMA).encode(batch_of(ROW))[0].tobytes()
    more = Schema((*FIELDS, Field(name="zebra", dtype="int64")))
    fewer = Schema(FIELDS[:-1])
    for schema in (more, fewer, Schema((sample_id_field(),))):
        with pytest.raises(DataError, match="record 0"):
            RecordDecoder(schema).decode(data, file="f")


def test_a_tensor_larger_than_the_records_takes_no_memory() -> None:
    narrow, wide = (
        Schema((sample_id_field(), Field(name="t", dtype="uint8", shape=(size,)))) for size in (1, (1 << 31) - 1)
    )
    rows = pa.RecordBatch.from_pylist([{"sample_id": 1, "t": b"x"}] * 100_000, schema=narrow.arrow_schema())
    data = RecordEncoder(narrow).encode(rows)[0].tobytes()
    with pytest.raises(DataError, match="field `t`"):  # 200 TB, were there room for all of them
        RecordDecoder(wide).decode(data, file="f")


def test_damage_names_file_record_and_offset() -> None:
    good = RecordEncoder(SCHEMA).encode(batch_of(ROW, ROW))[0].tobytes()
    data = bytearray(good)
    data[-10] ^= 1
    with pytest.raises(CorruptionError) as caught:
        RecordDecoder(SCHEMA).decode(data, file="f", first_record=5, base_offset=1000)
    assert (caught.value.file, caught.value.record, caught.value.offset) == ("f", 6, 1000 + len(good) // 2)


def test_text_that_is_not_utf8_is_refused() -> None:
    blobs, words = (
        Schema((sample_id_field(), Field(name="a", dtype=dtype, shape=(None,)), Field(name="b", dtype=dtype)))
        for dtype in ("bytes", "string")
    )
    for row in ({"a": [b"\xff"], "b": b""}, {"a": [b"ok"], "b": b"\xc3"}, {"a": [b"\xc3", b"\xa9"], "b": b""}):
        batch = pa.RecordBatch.from_pylist([{"sample_id": 1, **row}], schema=blobs.arrow_schema())
        with pytest.raises(DataError, match="record 0"):
            RecordDecoder(words).decode(RecordEncoder(blobs).encode(batch)[0], file="f")
