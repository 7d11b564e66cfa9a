"""tf.Example as bytes: a deterministic encoder without TensorFlow; its strict inverse is
lockstep/features/examples/example_reader.py.

An Example is a protobuf message; each feature of it lies so (lengths and int64 are base-128 varints):

    0a LENGTH                     Example.features
      0a LENGTH                   one entry of the map, entries in byte order of their names
        0a LENGTH NAME
        12 LENGTH                 Feature
          0a | 12 | 1a  LENGTH    bytes_list | float_list | int64_list
            0a LENGTH DATA ...    one each for bytes; numbers are packed into one; absent where the list is empty

int64 and bool become int64, float32 float, strings UTF-8 bytes; float64 and uint64 values and tensors are
little-endian bytes. A null is an absent feature, an empty list a present and empty one. tf.train.Example serialises to
the same entries; its deterministic order differs from byte order in one case only: it puts a name behind the longer
names that begin with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lockstep.features.examples.column_checks import as_recorded, check_nulls, check_tensor_lengths
from lockstep.features.examples.example_reader import decode_batch
from lockstep.features.examples.wire import MASK, list_tag, map_key, sized, varint
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema

__all__ = ["decode_batch", "encode_batch", "encode_example"]


def encode_example(schema: Schema, row: Mapping[str, Any]) -> bytes:
    """One row as an Example; `row` holds a Python value (None for null) for each field."""
    batch = pa.RecordBatch.from_pylist([dict(row)], schema=schema.arrow_schema())
    return encode_batch(schema, batch)[0]


def encode_batch(schema: Schema, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as an Example, or as a SequenceExample where the schema says so; columns by name.

    Raises DataError for a null where the schema allows none, for a tensor of the wrong length and for a column that
    lockstep.features.examples.column_checks.as_recorded refuses.
    """
    if schema.record == SEQUENCE_EXAMPLE:
        from lockstep.features.examples.sequence_example import encode_sequence_batch  # which builds on this module

        return encode_sequence_batch(schema, batch)
    columns = [_encode_column(field, batch.column(field.name)) for field in schema.in_byte_order]
    return [sized(0x0A, b"".join(entries)) for entries in zip(*columns, strict=True)]


def _packed(data: bytes) -> bytes:
    return sized(0x0A, data) if data else b""


def _list_body(field: Field) -> Callable[[Sequence[Any]], bytes]:
    """How the values of one row become the body of its list message."""
    if field.is_tensor:
        return lambda values: sized(0x0A, values[0])
    if field.dtype in ("int64", "bool"):
        return lambda values: _packed(b"".join(varint(int(value) & MASK) for value in values))
    if field.dtype == "float32":
        return lambda values: _packed(struct.pack(f"<{len(values)}f", *values))
    if field.dtype == "float64":
        return lambda values: b"".join(sized(0x0A, struct.pack("<d", value)) for value in values)
    if field.dtype == "uint64":
        return lambda values: b"".join(sized(0x0A, struct.pack("<Q", value)) for value in values)
    if field.dtype == "string":
        return lambda values: b"".join(sized(0x0A, value.encode()) for value in values)
    return lambda values: b"".join(sized(0x0A, value) for value in values)


def _encode_column(field: Field, column: pa.Array) -> list[bytes]:
    """Each row's map entry of this field; empty bytes where it is null."""
    column = as_recorded(field, column)
    check_nulls(field, column)
    if field.is_tensor:
        check_tensor_lengths(field, column)
    name, tag, body = map_key(field.name), list_tag(field), _list_body(field)
    known: dict[Any, bytes] = {}  # most columns repeat few values: encode each once a batch
    entries = []
    for value in column.to_pylist():
        key = tuple(value) if field.is_list else value
        # 0.0 == -0.0 and NaN != NaN: equal keys need not have equal bytes, so floats are not looked up
        entry = known.get(key) if not field.dtype.startswith("float") else None
        if entry is None:
            entry = b"" if value is None else _entry(name, tag, body(value if field.is_list else (value,)))
            if not field.is_tensor:
                known[key] = entry
        entries.append(entry)
    return entries


def _entry(name: bytes, tag: int, body: bytes) -> bytes:
    feature = sized(tag, body)
    return sized(0x0A, name + varint(len(feature)) + feature)
