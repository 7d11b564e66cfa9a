"""Examples that others wrote: everything that protobuf allows, judged by TensorFlow, and what is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.examples import foreign
from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.examples.foreign import decode_foreign_frames, infer_schema
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from tests.builders.records import encode_batch
from tests.features.examples.framed import decode_foreign
from tests.features.examples.test_encoder import tables
from tests.features.examples.test_example import ROWS, SCHEMA


def item(number: int, body: bytes) -> bytes:
    """A length-delimited field of a message; bodies here are shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(body)]) + body


def entry(name: str, *features: bytes) -> bytes:
    return item(1, item(1, name.encode()) + b"".join(item(2, feature) for feature in features))


def example(*entries: bytes) -> bytes:
    return item(1, b"".join(entries))


INTS = [Field(name="i", dtype="int64", shape=(None,))]
PACKED = item(3, item(1, b"\x01\x02"))
UNPACKED = item(3, b"\x08\x01\x08\x02")


@given(st.lists(ROWS, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_our_own_records_read_the_same(rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA.arrow_schema())
    found = decode_foreign(SCHEMA, encode_batch(SCHEMA, batch))
    assert found.schema.equals(SCHEMA.arrow_schema()) and found.to_pylist() == rows


@given(tables())
@settings(max_examples=60, deadline=None)
def test_the_kernel_reads_as_the_plain_reader(table: tuple[Schema, pa.RecordBatch]) -> None:
    schema, batch = table
    data, offsets = RecordEncoder(schema).encode(batch)
    found = decode_foreign_frames(schema, data, offsets)
    found.validate(full=True)
    plain = foreign.decode_foreign(schema, encode_batch(schema, batch))
    assert found.schema.equals(plain.schema) and repr(found.to_pylist()) == repr(plain.to_pylist())


# A list in two forms, its name twice, unknown fields around it; cut or changed in one byte.
MIXED = b"\x10\x05" + item(
    1,
    entry("x", item(1, item(1, b"abc")))
    + entry("i", item(3, b"\x08\x01" + item(1, b"\x02\xac\x02")))
    + entry("f", item(2, b"\x0d\0\0\x80\x3f" + item(1, b"\0\0\0\x40")))
    + b"\x18\x07"
    + entry("i", item(3, item(1, b"\x7f"))),
)
MIXED_FIELDS = [
    Field(name="i", dtype="int64", nullable=True),
    Field(name="f", dtype="float32", shape=(None,)),
    Field(name="x", dtype="string", nullable=True),
]


@given(st.integers(0, len(MIXED) - 1), st.integers(0, 255), st.booleans())
@settings(max_examples=200, deadline=None)
def test_changed_examples_are_read_or_refused_as_by_the_plain_reader(at: int, byte: int, cut: bool) -> None:
    changed = MIXED[:at] if cut else MIXED[:at] + bytes([byte]) + MIXED[at + 1 :]
    try:
        expected = foreign.decode_foreign(MIXED_FIELDS, [MIXED, changed])
    except DataError as error:
        with pytest.raises(DataError) as caught:
            decode_foreign(MIXED_FIELDS, [MIXED, changed])
        assert str(caught.value) == str(error)
    else:
        assert repr(decode_foreign(MIXED_FIELDS, [MIXED, changed]).to_pylist()) == repr(expected.to_pylist())


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (example(entry("i", PACKED)), [1, 2]),
        (example(entry("i", UNPACKED)), [1, 2]),
        (example(entry("i", item(3, b"\x08\x01" + item(1, b"\x02\x03") + b"\x08\x04"))), [1, 2, 3, 4]),  # mixed
        (example(entry("x", PACKED), entry("i", PACKED), entry("a", PACKED)), [1, 2]),  # any order, unknown names
        (example(entry("i", PACKED), entry("i", item(3, b"\x08\x09"))), [9]),  # the last entry of a name counts
        (example(entry("i", PACKED), entry("i")), []),  # and hides an earlier one, even without a list
        (example(entry("i", PACKED, UNPACKED)), [1, 2, 1, 2]),  # a field given twice is merged
        (example(entry("i", item(2, b""), PACKED)), [1, 2]),  # but of the lists the last kind counts
        (example(entry("i", PACKED)) + example(entry("j", PACKED)), [1, 2]),
        (b"\x10\x05" + b"\x19" + b"12345678" + b"\x1d" + b"1234" + example(entry("i", PACKED)), [1, 2]),  # unknown
        (item(1, item(1, item(2, PACKED) + item(1, b"i"))), [1, 2]),  # the value before the key
        (b"", []),
        (example(), []),
        (example(entry("i", item(3, b"\x08" + b"\xff" * 9 + b"\x01"))), [-1]),
    ],
)
def test_what_protobuf_allows(record: bytes, expected: list[int]) -> None:
    assert decode_foreign(INTS, [record]).column("i").to_pylist() == [expected]


def test_missing_is_null_and_in_a_list_nothing() -> None:
    fields = [Field(name="n", dtype="float32", nullable=True), *INTS]
    found = decode_foreign(fields, [b"", example(entry("n", item(2, item(1, b""))))])
    assert found.to_pylist() == [{"n": None, "i": []}] * 2


@pytest.mark.parametrize(
    ("field", "record", "got"),
    [
        (Field(name="i", dtype="int64"), example(), "0 values"),
        (Field(name="i", dtype="int64"), example(entry("i", PACKED)), "2 values"),
        (Field(name="i", dtype="float32"), example(entry("i", PACKED)), "int64_list"),
        (Field(name="i", dtype="bool"), example(entry("i", item(3, b"\x08\x02"))), "2"),
        (Field(name="i", dtype="string"), example(entry("i", item(1, item(1, b"\xff")))), "xff"),
        (Field(name="i", dtype="uint8", shape=(2,)), example(entry("i", item(1, item(1, b"abc")))), "3 bytes"),
        (Field(name="i", dtype="float64"), example(entry("i", item(1, item(1, b"abc")))), "3 bytes"),
    ],
)
def test_what_does_not_fit_names_record_and_field(field: Field, record: bytes, got: str) -> None:
    good = example(entry("i", item(3, b"\x08\x01"))) if field.dtype in ("int64", "bool") else record
    with pytest.raises(DataError, match=r"record \d of the batch, field `i`") as caught:
        decode_foreign([field], [good, record])
    assert got in caught.value.got


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_noise_ends_in_rows_or_in_our_error(noise: bytes) -> None:
    try:
        assert decode_foreign(INTS, [noise]).num_rows == 1
        infer_schema([noise])
    except DataError as error:
        assert error.got and error.allowed


def test_types_are_inferred() -> None:
    text, raw = (item(1, item(1, value)) for value in (b"caf\xc3\xa9", b"\x00\x01"))
    records = [
        example(entry("t", text), entry("r", raw), entry("i", PACKED), entry("f", item(2, b"\x0d\0\0\0\0"))),
        example(entry("r", text), entry("one", item(3, b"\x08\x01")), entry("none", item(3, b"")), entry("unset")),
    ]
    assert infer_schema(records) == [
        ("f", "float32", False),
        ("i", "int64", True),
        ("none", "int64", True),
        ("one", "int64", False),
        ("r", "bytes", False),
        ("t", "string", False),
    ]
    with pytest.raises(DataError, match="record 1 of the batch, field `i`"):
        infer_schema([example(entry("i", PACKED)), example(entry("i", text))])


@pytest.mark.slow
@given(st.binary(max_size=40))
@settings(max_examples=100, deadline=None)
def test_tensorflow_agrees_on_what_is_an_example(noise: bytes) -> None:
    """Bytes that TensorFlow parses are read as the same values; those that it refuses may only be refused."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # it has none

    record = example(item(1, noise))
    try:
        expected = list(tf.train.Example.FromString(record).features.feature["i"].int64_list.value)
    except (DecodeError, UnicodeDecodeError):
        return
    try:
        found = decode_foreign(INTS, [record]).column("i").to_pylist()[0]
    except DataError:
        return  # groups, or a list of another type
    assert found == expected
