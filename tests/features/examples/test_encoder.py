"""The encoder kernel: its bytes and its errors are those of the plain encoder, whatever the columns are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.examples.codec import RecordEncoder
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import DataError
from lockstep.storage.formats.tfrecord import frame
from tests.builders.records import encode_batch

LIMITS = [0, 1, 127, 128, 2**14 - 1, 2**14, 2**55, 2**56 - 1, 2**56, 2**63 - 1, -1, -(2**63)]
INTS = st.sampled_from(LIMITS) | st.integers(-(2**63), 2**63 - 1)
FLOATS = st.sampled_from([0.0, -0.0, math.nan, math.inf, 5e-324]) | st.floats()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["x" * n for n in range(90, 150)]
)
BLOBS = st.binary(max_size=20) | st.integers(100, 140).map(bytes) | st.just(bytes(range(256)) * 65)
VALUES: dict[str, Any] = {
    "int64": INTS,
    "bool": st.booleans(),
    "float32": st.sampled_from([0.0, -0.0, math.nan, math.inf]) | st.floats(width=32),
    "float64": FLOATS,
    "uint64": st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    "string": TEXT,
    "bytes": BLOBS,
}
WIDER = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def encoded(encoder: RecordEncoder, batch: pa.RecordBatch) -> list[bytes]:
    data, offsets = encoder.encode(batch)
    assert np.array_equal(encoder.sizes(batch), np.diff(offsets)) and offsets[0] == 0 and offsets[-1] == len(data)
    raw = data.tobytes()
    return [raw[start:stop] for start, stop in pairwise(offsets)]


def expected(schema: Schema, batch: pa.RecordBatch) -> list[bytes]:
    return [frame(record) for record in encode_batch(schema, batch)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, pa.RecordBatch]:
    """Any schema and rows for it: nulls, empty lists, long names, 64-bit offsets, a batch that begins inside arrays."""
    fields, columns, rows = [sample_id_field()], {}, draw(st.integers(0, 6))
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.integers(100, 140).map("n".__mul__)
    for name in draw(st.lists(names.filter(lambda name: not name.startswith("_")), max_size=5, unique=True)):
        if name == "sample_id":
            continue
        dtype = draw(st.sampled_from([*VALUES, "tensor"]))
        if dtype == "tensor":
            size = draw(st.sampled_from([1, 5, 130]))
            field = Field(name=name, dtype="uint8", shape=(size,), nullable=draw(st.booleans()))
            values: Any = st.binary(min_size=size, max_size=size)
        else:
            shape: tuple[int | None, ...] = draw(st.sampled_from([(), (None,)]))
            field = Field(name=name, dtype=dtype, shape=shape, nullable=not shape and draw(st.booleans()))
            values = VALUES[dtype] if not shape else st.lists(VALUES[dtype], max_size=4)
        values = st.none() | values if field.nullable else values
        fields.append(field)
        columns[name] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), field.arrow_type)
        if dtype == "uint64" and draw(st.booleans()):  # as numbers, where a table of Spark has decimals
            columns[name] = columns[name].cast(field.record_type)
        elif draw(st.booleans()) and not field.is_list:
            columns[name] = columns[name].cast(WIDER.get(field.arrow_type, field.arrow_type))
        elif field.is_list and draw(st.booleans()):
            item = field.arrow_type.value_type
            columns[name] = columns[name].cast(pa.large_list(WIDER.get(item, item)))
    columns["sample_id"] = pa.array(draw(st.lists(INTS, min_size=rows, max_size=rows)), pa.int64())
    batch = pa.RecordBatch.from_pydict(columns)
    start = draw(st.integers(0, rows))
    return Schema(tuple(fields)), batch.slice(start, draw(st.integers(0, rows - start)))


@given(tables())
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_the_plain_encoder(table: tuple[Schema, pa.RecordBatch]) -> None:
    schema, batch = table
    assert encoded(RecordEncoder(schema), batch) == expected(schema, batch)


def test_blocks_and_a_reused_buffer_change_nothing() -> None:
    """More rows than a block, records longer than one, and a second batch in the buffer of the first."""
    fields = (Field(name="a", dtype="int64", nullable=True), Field(name="b", dtype="bytes"))
    schema = Schema((sample_id_field(), *fields))
    encoder = RecordEncoder(schema)
    for rows, size in ((700, 3), (40, 3000), (5, 70_000), (300, 0)):
        columns = {
            "sample_id": pa.array([(-3) ** (n % 40) for n in range(rows)], pa.int64()),
            "a": pa.array([None if n % 7 == 0 else n for n in range(rows)], pa.int64()),
            "b": pa.array([bytes([n % 256]) * (size + n % 50) for n in range(rows)], pa.binary()),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        assert encoded(encoder, batch) == expected(schema, batch)


NUMBER = Schema((sample_id_field(), Field(name="v", dtype="int64")))
REAL = Schema((sample_id_field(), Field(name="v", dtype="float32")))
WORDS = Schema((sample_id_field(), Field(name="v", dtype="string", shape=(None,))))
PIXELS = Schema((sample_id_field(), Field(name="v", dtype="uint8", shape=(3,))))


@pytest.mark.parametrize(
    ("schema", "column", "what"),
    [
        (NUMBER, pa.array([1, None]), "`v` is null in 1 rows"),
        (WORDS, pa.array([["a"], [None]]), "null inside a list"),
        (PIXELS, pa.array([b"abc", b"ab"]), "wrong length"),
        (NUMBER, pa.array([1.0, 2.0]), "another type"),
        (REAL, pa.array([1.0, 0.1]), "another type"),  # float64 would be rounded
        (NUMBER, pa.array([1, 2**63], pa.uint64()), "another type"),  # does not fit
        (NUMBER, pa.array(["1", "2"]), "another type"),
        (WORDS, pa.array(["a", "b"]), "another type"),
    ],
)
def test_what_cannot_be_encoded_is_refused(schema: Schema, column: pa.Array, what: str) -> None:
    batch = pa.RecordBatch.from_pydict({"sample_id": pa.array([1, 2]), "v": column})
    encoder, plain = RecordEncoder(schema), partial(encode_batch, schema)
    calls: list[Callable[[pa.RecordBatch], object]] = [encoder.encode, encoder.sizes, plain]
    for call in calls:
        with pytest.raises(DataError, match=what):
            call(batch)


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        (NUMBER, pa.array([1, -2], pa.int8())),
        (NUMBER, pa.array([1, 2], pa.uint64())),
        (REAL, pa.array(np.array([1, 0.1], dtype=np.float16))),
        (WORDS, pa.array([["a"], ["b"]], pa.list_(pa.large_string(), 1))),
        (PIXELS, pa.array([b"abc", b"def"], pa.binary(3))),
    ],
)
def test_a_column_that_widens_is_taken(schema: Schema, column: pa.Array) -> None:
    batch = pa.RecordBatch.from_pydict({"sample_id": pa.array([1, 2]), "v": column})
    exact = batch.set_column(1, "v", column.cast(schema["v"].arrow_type))
    assert encoded(RecordEncoder(schema), batch) == expected(schema, exact) == expected(schema, batch)
