"""tf.Examples of our own form back to columns: the strict inverse of lockstep/features/examples/example.py, which
has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.features.examples.column_checks import check_tensor_lengths
from lockstep.features.examples.wire import MASK, BytesLike, list_tag, map_key, read_varint
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import SEQUENCE_EXAMPLE, Schema
from lockstep.storage.errors import DataError


def decode_batch(schema: Schema, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from records that encode_batch wrote, as columns of schema.arrow_schema().

    Raises DataError naming record and field for bytes that are anything else: another order or type, a missing or
    unknown feature, a wrong number of values.
    """
    if schema.record == SEQUENCE_EXAMPLE:
        from lockstep.features.examples.sequence_example import decode_sequence_batch

        return decode_sequence_batch(schema, records)
    fields = schema.in_byte_order
    plans = [(map_key(field.name), list_tag(field), field) for field in fields]
    bodies: list[list[bytes | None]] = [[] for _ in fields]
    for number, record in enumerate(records):
        _split(bytes(record), plans, bodies, number)
    columns = {field.name: _decode_column(field, body) for field, body in zip(fields, bodies, strict=True)}
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema.arrow_schema())


def _split(record: bytes, plans: list[tuple[bytes, int, Field]], bodies: list[list[bytes | None]], number: int) -> None:
    """Append each field's list body (None for an absent feature) to its column; every length is checked."""
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
                column.append(None)  # absent here; whatever stands here instead must be the next field's entry
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
    if field.dtype == "uint64":
        return lambda body: [struct.unpack("<Q", item)[0] for item in _items(body)]
    if field.dtype == "string":
        return lambda body: [item.decode() for item in _items(body)]
    return _items


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
