"""tf.Example as bytes: a deterministic encoder and its strict inverse, in Python and without TensorFlow.

The compiled codec (lockstep/features/examples/codec.py) writes and reads the same bytes.

An Example is a protobuf message. Each feature is stored as follows (lengths and int64 are base-128 varints):

    0a LENGTH                     Example.features
      0a LENGTH                   one entry of the map, entries in byte order of their names
        0a LENGTH NAME
        12 LENGTH                 Feature
          0a | 12 | 1a  LENGTH    bytes_list | float_list | int64_list
            0a LENGTH DATA ...    one for each bytes value; numbers packed into one; absent if the list is empty

int64 and bool are int64, float32 is float, strings are UTF-8 bytes; float64 and uint64 values and tensors are
little-endian bytes. A null is an absent feature; an empty list is a present feature with an empty list.
tf.train.Example serialises to the same entries; its deterministic order differs from byte order in one case: it sorts a
name after the longer names that begin with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.features.examples.column_checks import as_recorded, check_nulls, check_tensor_lengths
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns
from lockstep.storage.errors import DataError

BytesLike = bytes | bytearray | memoryview
# The tags of Feature's lists.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 0x0A, 0x12, 0x1A
VARINT_MAX_BYTES = 10
MASK = (1 << 64) - 1
_LIST_TAGS = {"int64": INT64_LIST, "bool": INT64_LIST, "float32": FLOAT_LIST}
EIGHT_BYTES = {"float64": "<d", "uint64": "<Q"}
_ONE_BYTE = [bytes([value]) for value in range(128)]


def list_tag(field: Field) -> int:
    """The tag of the list that stores a field's values."""
    return BYTES_LIST if field.is_tensor else _LIST_TAGS.get(field.dtype, BYTES_LIST)


def varint(value: int) -> bytes:
    """A base-128 varint; `value` is not negative."""
    if value < 128:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: BytesLike, at: int) -> tuple[int, int]:
    """The varint at `at` and its end; IndexError for one that is cut off or longer than necessary.

    The value may have more than 64 bits: the caller checks that.
    """
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for index in range(1, VARINT_MAX_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            if byte == 0:
                break
            return value, at + index + 1
    raise IndexError("a varint of more bytes than necessary")


def sized(tag: int, data: bytes) -> bytes:
    """A length-delimited field: its tag of one byte, the length, the data."""
    return bytes((tag,)) + varint(len(data)) + data


def map_key(name: str) -> bytes:
    """The start of an entry in a map of features, up to the length of its value: the name and the value's tag."""
    return sized(0x0A, name.encode()) + b"\x12"


def encode_examples(schema: Columns, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as an Example; columns are found by name.

    Raises DataError for a null that the schema does not allow, for a tensor of the wrong length and for a column that
    lockstep.features.examples.column_checks.as_recorded refuses.
    """
    columns = [_encode_column(field, batch.column(field.name)) for field in schema.in_byte_order]
    return [sized(0x0A, b"".join(entries)) for entries in zip(*columns, strict=True)]


def _packed(data: bytes) -> bytes:
    return sized(0x0A, data) if data else b""


def _list_body(field: Field, values: Sequence[Any]) -> bytes:
    """The body of the list message that holds the values of one row."""
    if field.dtype in _LIST_TAGS and not field.is_tensor:
        if field.dtype == "float32":
            return _packed(struct.pack(f"<{len(values)}f", *values))
        return _packed(b"".join(varint(int(value) & MASK) for value in values))
    if field.dtype in EIGHT_BYTES and not field.is_tensor:
        values = [struct.pack(EIGHT_BYTES[field.dtype], value) for value in values]
    elif field.dtype == "string":
        values = [value.encode() for value in values]
    return b"".join(sized(0x0A, value) for value in values)


def _encode_column(field: Field, column: pa.Array) -> list[bytes]:
    """Each row's map entry of this field; empty bytes where it is null."""
    column = as_recorded(field, column)
    check_nulls(field, column)
    if field.is_tensor:
        check_tensor_lengths(field, column)
    name, tag = map_key(field.name), list_tag(field)
    known: dict[Any, bytes] = {}  # most columns repeat few values: encode each once for a batch
    entries = []
    for value in column.to_pylist():
        key = tuple(value) if field.is_list else value
        # Floats are not looked up: 0.0 == -0.0, but their bytes differ
        entry = known.get(key) if not field.dtype.startswith("float") else None
        if entry is None:
            entry = b"" if value is None else _entry(name, tag, _list_body(field, value if field.is_list else (value,)))
            if not field.is_tensor:
                known[key] = entry
        entries.append(entry)
    return entries


def _entry(name: bytes, tag: int, body: bytes) -> bytes:
    feature = sized(tag, body)
    return sized(0x0A, name + varint(len(feature)) + feature)


def decode_examples(schema: Columns, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from records that encode_examples wrote, as columns of schema.arrow_schema().

    Raises DataError naming record and field for all other bytes: another order or type, a missing or unknown feature,
    a wrong number of values.
    """
    fields = schema.in_byte_order
    plans = [(map_key(field.name), list_tag(field), field) for field in fields]
    bodies: list[list[bytes | None]] = [[] for _ in fields]
    for number, record in enumerate(records):
        _split(bytes(record), plans, bodies, number)
    columns = {field.name: _decode_column(field, body) for field, body in zip(fields, bodies, strict=True)}
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema.arrow_schema())


def _split(record: bytes, plans: list[tuple[bytes, int, Field]], bodies: list[list[bytes | None]], number: int) -> None:
    """Append each field's list body (None for an absent feature) to its column, checking every length."""
    field: Field | None = None
    try:
        size, at = read_varint(record, 1)
        good = record[0] == 0x0A and at + size == len(record)
        for (name, tag, current), column in zip(plans, bodies, strict=True):
            if not good:
                break
            field = current
            if at == len(record):
                column.append(None)
                continue
            size, start = read_varint(record, at + 1)
            if record[at] != 0x0A or not record.startswith(name, start):
                column.append(None)  # absent: this entry must be that of a later field
                continue
            entry_end = start + size
            size, start = read_varint(record, start + len(name))
            good = start + size == entry_end and record[start] == tag
            size, at = read_varint(record, start + 1)
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
        next_step="Run `lockstep verify URL`; if it finds no error, the shard was written with another schema.",
    )


def _decode_column(field: Field, bodies: list[bytes | None]) -> pa.Array:
    if not field.nullable:
        missing = next((number for number, body in enumerate(bodies) if body is None), None)
        if missing is not None:
            raise _bad(field, missing, "no such feature", "a value in each record")
    values: list[Any] = []
    for number, body in enumerate(bodies):
        try:
            items = None if body is None else _values_of(field, body)
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


def _values_of(field: Field, body: bytes) -> list[Any]:
    """The values in the body of a list message; raises IndexError or struct.error for another form."""
    if field.dtype in _LIST_TAGS and not field.is_tensor:
        if field.dtype == "float32":
            return _floats(body)
        numbers = _varints(body)
        if field.dtype == "bool":
            return [(False, True)[number] for number in numbers]
        return [number - (1 << 64) if number >> 63 else number for number in numbers]
    items = _items(body)
    if field.dtype in EIGHT_BYTES and not field.is_tensor:
        return [struct.unpack(EIGHT_BYTES[field.dtype], item)[0] for item in items]
    return [item.decode() for item in items] if field.dtype == "string" else items


def _items(body: bytes) -> list[bytes]:
    items, at = [], 0
    while at < len(body):
        size, start = read_varint(body, at + 1)
        at_end = start + size
        if body[at] != 0x0A or at_end > len(body):
            raise IndexError("not a bytes item")
        items.append(body[start:at_end])
        at = at_end
    return items


def _data(body: bytes) -> bytes:
    if not body:
        return b""
    size, start = read_varint(body, 1)
    if body[0] != 0x0A or size == 0 or start + size != len(body):
        raise IndexError("not one packed list")
    return body[start:]


def _varints(body: bytes) -> list[int]:
    data, at, values = _data(body), 0, []
    while at < len(data):
        value, at = read_varint(data, at)
        if value > MASK:
            raise IndexError("a varint of more than 64 bits")
        values.append(value)
    return values


def _floats(body: bytes) -> list[float]:
    data = _data(body)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
