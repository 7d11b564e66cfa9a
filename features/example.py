"""tf.Example as bytes: a deterministic encoder and its strict inverse, without TensorFlow.

An Example is a protobuf message; each feature of it lies so (lengths and int64 are base-128 varints):

    0a LENGTH                     Example.features
      0a LENGTH                   one entry of the map, entries in byte order of their names
        0a LENGTH NAME
        12 LENGTH                 Feature
          0a | 12 | 1a  LENGTH    bytes_list | float_list | int64_list
            0a LENGTH DATA ...    one each for bytes; numbers are packed into one; absent where the list is empty

int64 and bool become int64, float32 float, strings UTF-8 bytes; float64 values and tensors are little-endian
bytes. A null is an absent feature, an empty list a present and empty one. tf.train.Example serialises to the same
entries; its deterministic order differs from byte order in one case only: it puts a name behind the longer names
that begin with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from features.schema import SEQUENCE_EXAMPLE, Field, Schema
from storage.errors import DataError

BytesLike = bytes | bytearray | memoryview

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x1A
_VARINT_64_MAX_BYTES = 10
_MASK = (1 << 64) - 1
_TENSOR_ITEM_BYTES = {"uint8": 1, "float32": 4, "float64": 8, "int64": 8}
_LIST_TAG = {"int64": _INT64_LIST, "bool": _INT64_LIST, "float32": _FLOAT_LIST}


def tensor_bytes(field: Field) -> int:
    """How many bytes a tensor of this field takes."""
    return math.prod(size for size in field.shape if size is not None) * _TENSOR_ITEM_BYTES[field.dtype]


def encode_example(schema: Schema, row: Mapping[str, Any]) -> bytes:
    """One row as an Example; `row` holds a Python value (None for null) for each field."""
    batch = pa.RecordBatch.from_pylist([dict(row)], schema=schema.arrow_schema())
    return encode_batch(schema, batch)[0]


def encode_batch(schema: Schema, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as an Example, or as a SequenceExample where the schema says so; columns by name.

    Raises DataError for a null where the schema allows none and for a tensor of the wrong length.
    """
    if schema.record == SEQUENCE_EXAMPLE:
        from features.sequence_example import encode_sequence_batch  # which builds on this module

        return encode_sequence_batch(schema, batch)
    columns = [_encode_column(field, batch.column(field.name)) for field in schema.in_byte_order]
    examples = []
    for entries in zip(*columns, strict=True):
        features = b"".join(entries)
        examples.append(b"\x0a" + _varint(len(features)) + features)
    return examples


def decode_batch(schema: Schema, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from records that encode_batch wrote, as columns of schema.arrow_schema().

    Raises DataError naming record and field for bytes that are anything else: another order or type, a missing or
    unknown feature, a wrong number of values.
    """
    if schema.record == SEQUENCE_EXAMPLE:
        from features.sequence_example import decode_sequence_batch

        return decode_sequence_batch(schema, records)
    fields = schema.in_byte_order
    plans = [(_name_part(field), _tag(field), field) for field in fields]
    bodies: list[list[bytes | None]] = [[] for _ in fields]
    for number, record in enumerate(records):
        _split(bytes(record), plans, bodies, number)
    columns = {field.name: _decode_column(field, body) for field, body in zip(fields, bodies, strict=True)}
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema.arrow_schema())


def _varint(value: int) -> bytes:
    if value < 128:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = [bytes([value]) for value in range(128)]


def _tag(field: Field) -> int:
    return _BYTES_LIST if field.is_tensor else _LIST_TAG.get(field.dtype, _BYTES_LIST)


def _name_part(field: Field) -> bytes:
    name = field.name.encode()
    return b"\x0a" + _varint(len(name)) + name + b"\x12"


def _bytes_item(value: bytes) -> bytes:
    return b"\x0a" + _varint(len(value)) + value


def _packed(data: bytes) -> bytes:
    return b"\x0a" + _varint(len(data)) + data if data else b""


def _list_body(field: Field) -> Callable[[Sequence[Any]], bytes]:
    """How the values of one row become the body of its list message."""
    if field.is_tensor:
        return lambda values: _bytes_item(values[0])
    if field.dtype in ("int64", "bool"):
        return lambda values: _packed(b"".join(_varint(int(value) & _MASK) for value in values))
    if field.dtype == "float32":
        return lambda values: _packed(struct.pack(f"<{len(values)}f", *values))
    if field.dtype == "float64":
        return lambda values: b"".join(_bytes_item(struct.pack("<d", value)) for value in values)
    if field.dtype == "string":
        return lambda values: b"".join(_bytes_item(value.encode()) for value in values)
    return lambda values: b"".join(_bytes_item(value) for value in values)


def _encode_column(field: Field, column: pa.Array) -> list[bytes]:
    """Each row's map entry of this field; empty bytes where it is null."""
    check_nulls(field, column)
    if field.is_tensor:
        check_tensor_lengths(field, column)
    name, tag, body = _name_part(field), bytes([_tag(field)]), _list_body(field)
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


def _entry(name: bytes, tag: bytes, body: bytes) -> bytes:
    feature = tag + _varint(len(body)) + body
    entry = name + _varint(len(feature)) + feature
    return b"\x0a" + _varint(len(entry)) + entry


def check_nulls(field: Field, column: pa.Array) -> None:
    """Raise DataError for a null in a column that must have none, or inside a list."""
    if column.null_count and not field.nullable:
        raise DataError(
            f"field `{field.name}` is null in {column.null_count} rows",
            got="null",
            allowed="a value in each row, since the schema says that it is not nullable",
            next_step="Declare the field nullable or drop those rows.",
        )
    if field.is_list and column.flatten().null_count:
        raise DataError(
            f"field `{field.name}` holds a null inside a list",
            got="null",
            allowed="values",
            next_step="Drop nulls from the lists.",
        )


def check_tensor_lengths(field: Field, column: pa.Array) -> None:
    """Raise DataError for a value of a tensor's column, (n,) bytes, that is longer or shorter than the tensor."""
    wanted, lengths = tensor_bytes(field), pc.binary_length(column)
    wrong = lengths.filter(pc.not_equal(lengths, wanted))
    if len(wrong):
        raise DataError(
            f"a tensor of field `{field.name}` has the wrong length",
            got=f"{wrong[0]} bytes",
            allowed=f"{wanted} bytes: shape {field.shape} of {field.dtype}",
            next_step="Correct the schema or the rows.",
        )


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for index in range(1, _VARINT_64_MAX_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise IndexError("a varint of more than 10 bytes")


def _split(record: bytes, plans: list[tuple[bytes, int, Field]], bodies: list[list[bytes | None]], number: int) -> None:
    """Append each field's list body (None for an absent feature) to its column; every length is checked."""
    field: Field | None = None
    try:
        size, at = _read_varint(record, 1)
        good = record[0] == 0x0A and at + size == len(record)
        for (name, tag, current), column in zip(plans, bodies, strict=True):
            if not good:
                break
            field = current
            if at == len(record):
                column.append(None)
                continue
            size, start = _read_varint(record, at + 1)
            if record[at] != 0x0A or not record.startswith(name, start):
                column.append(None)  # absent here; whatever stands here instead must be the next field's entry
                continue
            entry_end = start + size
            size, start = _read_varint(record, start + len(name))
            good = start + size == entry_end and record[start] == tag
            size, at = _read_varint(record, start + 1)
            good = good and at + size == entry_end
            column.append(record[at:entry_end])
            at = entry_end
        good = good and at == len(record)
    except IndexError:
        good = False
    if not good:
        raise _bad(field, number, "bytes in another form", "an Example of exactly the schema's fields, in byte order")


def _bad(field: Field | None, number: int, got: str, allowed: str) -> DataError:
    where = f", field `{field.name}`" if field is not None else ""
    return DataError(
        f"record {number} of the batch does not fit the schema{where}",
        got=got,
        allowed=allowed,
        next_step="Run `python -m jobs.verify URL`; if it finds nothing, the shard was written with another schema.",
    )


def _decode_column(field: Field, bodies: list[bytes | None]) -> pa.Array:
    if not field.nullable:
        missing = next((number for number, body in enumerate(bodies) if body is None), None)
        if missing is not None:
            raise _bad(field, missing, "no such feature", "a value in each record")
    read = _reader(field)
    values: list[Any] = []
    for number, body in enumerate(bodies):
        try:
            items = None if body is None else read(body)
        except (IndexError, struct.error, UnicodeDecodeError):
            raise _bad(field, number, "values in another form", f"{field.dtype}, shape {field.shape}") from None
        if items is not None and not field.is_list and len(items) != 1:
            raise _bad(field, number, f"{len(items)} values", "exactly 1")
        values.append(items if items is None or field.is_list else items[0])
    if field.is_tensor:
        check_tensor_lengths(field, pa.array(values, type=pa.large_binary()))
    if field.dtype == "float32" and not field.is_list and not field.is_tensor:
        mask = np.array([value is None for value in values], dtype=bool)
        return pa.array(np.array([0.0 if v is None else v for v in values], dtype=np.float32), mask=mask)
    return pa.array(values, type=field.arrow_type)


def _reader(field: Field) -> Callable[[bytes], list[Any]]:
    """How the body of a list message becomes values; raises IndexError or struct.error for another form."""
    if field.is_tensor:
        return _items
    if field.dtype == "int64":
        return lambda body: [value - (1 << 64) if value >> 63 else value for value in _varints(body)]
    if field.dtype == "bool":
        return lambda body: [(False, True)[value] for value in _varints(body)]
    if field.dtype == "float32":
        return _floats
    if field.dtype == "float64":
        return lambda body: [struct.unpack("<d", item)[0] for item in _items(body)]
    if field.dtype == "string":
        return lambda body: [item.decode() for item in _items(body)]
    return _items


def _items(body: bytes) -> list[bytes]:
    items, at = [], 0
    while at < len(body):
        size, start = _read_varint(body, at + 1)
        at_end = start + size
        if body[at] != 0x0A or at_end > len(body):
            raise IndexError("not a bytes item")
        items.append(body[start:at_end])
        at = at_end
    return items


def _data(body: bytes) -> bytes:
    if not body:
        return b""
    size, start = _read_varint(body, 1)
    if body[0] != 0x0A or size == 0 or start + size != len(body):
        raise IndexError("not one packed list")
    return body[start:]


def _varints(body: bytes) -> list[int]:
    data, at, values = _data(body), 0, []
    while at < len(data):
        value, at = _read_varint(data, at)
        if value > _MASK:
            raise IndexError("a varint of more than 64 bits")
        values.append(value)
    return values


def _floats(body: bytes) -> list[float]:
    data = _data(body)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
