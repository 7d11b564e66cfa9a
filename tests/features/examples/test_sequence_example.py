"""SequenceExamples: there and back, and bytes of another form. test_parse_spec.py holds them against TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.columns import RECORD
from lockstep.etl.split.assign import Stored
from lockstep.features.examples.codec import RecordDecoder
from lockstep.features.examples.sequence_example import SequenceEncoder, decode_sequence_batch, encode_sequence_batch
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema
from lockstep.storage.errors import ConfigError, DataError
from lockstep.storage.formats.tfrecord import parse_records
from lockstep.storage.fs import filesystem
from tests.training._tiny import write_rows

VALUES: dict[str, list[Any]] = {
    "int64": [2**63 - 1, -(2**63), 0],
    "float32": [0.5, -0.0, float("inf")],
    "float64": [0.1, 1e308, 5e-324],
    "uint64": [2**64 - 1, 0, 5],
    "bool": [True, False, True],
    "string": ["é", "", "\U0001f600\0"],
    "bytes": [b"\xff", b"", b"a" * 200],
}
SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="x", dtype="float64", nullable=True),
        Field(name="t", dtype="uint8", shape=(2,)),
        *(Field(name=f"{dtype}s", dtype=dtype, shape=(None,)) for dtype in VALUES),
    ),
    SEQUENCE_EXAMPLE,
)


def rows() -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {"sample_id": [1, -2, 3], "x": [0.1, None, 2.0], "t": [b"ab", b"cd", b"ef"]}
    columns |= {f"{dtype}s": [values, [], values[:1]] for dtype, values in VALUES.items()}
    batch = pa.RecordBatch.from_pydict(columns, schema=SCHEMA.arrow_schema())
    return pa.concat_batches([batch, batch]).slice(2, 3)  # a slice has offsets of its own


VALUE = st.fixed_dictionaries(
    {
        "sample_id": st.integers(-(2**63), 2**63 - 1),
        "x": st.none() | st.floats(),
        "t": st.binary(min_size=2, max_size=2),
        "int64s": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        "float32s": st.lists(st.floats(width=32), max_size=4),
        "float64s": st.lists(st.floats(), max_size=4),
        "uint64s": st.lists(st.integers(0, 2**64 - 1), max_size=4),
        "bools": st.lists(st.booleans(), max_size=4),
        "strings": st.lists(st.text(max_size=150), max_size=3),
        "bytess": st.lists(st.binary(max_size=3), max_size=4),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(VALUE, max_size=4))
def test_there_and_back(values: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(values, schema=SCHEMA.arrow_schema())
    records = encode_sequence_batch(SCHEMA, batch)
    again = decode_sequence_batch(SCHEMA, records)
    assert again.schema == SCHEMA.arrow_schema()
    assert encode_sequence_batch(SCHEMA, again) == records
    data, offsets = SequenceEncoder(SCHEMA).encode(batch)
    assert [bytes(record) for record in parse_records(data.tobytes(), file="x")] == records
    assert SequenceEncoder(SCHEMA).sizes(batch).tolist() == np.diff(offsets).tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_other_bytes_are_an_error_and_nothing_else(data: st.DataObject) -> None:
    record = bytearray(encode_sequence_batch(SCHEMA, rows())[1])
    where = data.draw(st.integers(0, len(record) - 1))
    record[where] ^= 1 << data.draw(st.integers(0, 7))
    try:
        changed = decode_sequence_batch(SCHEMA, [bytes(record[: data.draw(st.integers(0, len(record)))])])
    except DataError:
        return
    assert encode_sequence_batch(SCHEMA, changed)[0] == bytes(record), "a change within a value"


def test_what_cannot_be_declared_or_written() -> None:
    with pytest.raises(ConfigError, match="schema"):
        Schema((sample_id_field(),), SEQUENCE_EXAMPLE)
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA and SCHEMA.to_json()["record"] == "sequence_example"
    with pytest.raises(ConfigError, match="schema"):
        Schema.from_json({**SCHEMA.to_json(), "record": "row"})
    schema = Schema((sample_id_field(), Field(name="l", dtype="int64", shape=(None,))), SEQUENCE_EXAMPLE)
    batch = pa.RecordBatch.from_pydict({"sample_id": [1], "l": [[1, None]]}, schema=schema.arrow_schema())
    with pytest.raises(DataError, match="holds a null"):
        encode_sequence_batch(schema, batch)


@pytest.mark.parametrize(
    ("dtype", "column"),
    [
        ("float32", pa.array([[0.1, 1e300]])),  # 1e300 would be inf
        ("float32", pa.array([[0.5]])),  # as lockstep.features.examples has it: by type, whatever the values
        ("int64", pa.array([[1.5, 2.7]])),
        ("int64", pa.array([[2**64 - 1]], pa.list_(pa.uint64()))),  # would be -1
        ("bool", pa.array([[5]])),
        ("string", pa.array([[1]])),
        ("int64", pa.array([1])),
    ],
)
def test_a_value_is_never_narrowed(dtype: str, column: pa.Array) -> None:
    lists = Schema((sample_id_field(), Field(name="v", dtype=dtype, shape=(None,))), SEQUENCE_EXAMPLE)
    with pytest.raises(DataError, match="another type"):
        encode_sequence_batch(lists, pa.RecordBatch.from_pydict({"sample_id": pa.array([1]), "v": column}))
    if pa.types.is_list(column.type):
        empty = Field(name="w", dtype="int64", shape=(None,))
        context = Schema((sample_id_field(), Field(name="v", dtype=dtype), empty), SEQUENCE_EXAMPLE)
        values = column.flatten()[:1]
        none = pa.array([[]], pa.list_(pa.int64()))
        with pytest.raises(DataError, match="another type"):
            encode_sequence_batch(context, pa.RecordBatch.from_pydict({"sample_id": [1], "v": values, "w": none}))


@pytest.mark.parametrize(
    ("dtype", "column"),
    [
        ("int64", pa.array([[1, -2]], pa.large_list(pa.int8()))),
        ("string", pa.array([["a", "b"]], pa.list_(pa.large_string(), 2))),
        ("uint64", pa.array([[1, 2]], pa.list_(pa.uint8()))),
        ("float64", pa.array([[0.5, 1]], pa.list_(pa.float32()))),
    ],
)
def test_a_list_that_widens_is_taken(dtype: str, column: pa.Array) -> None:
    schema = Schema((sample_id_field(), Field(name="v", dtype=dtype, shape=(None,))), SEQUENCE_EXAMPLE)
    one, exact = (
        pa.RecordBatch.from_pydict({"sample_id": pa.array([1]), "v": values})
        for values in (column, column.cast(schema["v"].arrow_type))
    )
    assert encode_sequence_batch(schema, one) == encode_sequence_batch(schema, exact)


def test_a_dataset_of_them_is_read_like_any_other(tmp_path: Path) -> None:
    batch = rows()
    manifest = write_rows(str(tmp_path / "d"), SCHEMA, batch, {"train": 3}, "tfrecord", 1, 8, 0)
    shard = filesystem(str(tmp_path)).read_bytes(str(tmp_path / "d" / "split=train" / "part-00000.tfrecord"))
    assert [bytes(record) for record in parse_records(shard, file="x")] == encode_sequence_batch(SCHEMA, batch)
    schema = Schema.from_json(manifest.schema)
    assert RecordDecoder(schema).decode(shard, file="x").equals(batch)
    assert RecordDecoder(schema, ["x"]).decode(shard, file="x").column("x").to_pylist() == batch.column("x").to_pylist()
    framed = Stored(schema, "tfrecord").columns(batch)[RECORD]
    assert b"".join(framed.to_pylist()) == shard
