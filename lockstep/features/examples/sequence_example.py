"""tf.SequenceExample for schemas with `record = "sequence_example"`: lists become feature lists.

A SequenceExample is a protobuf message. Its first field, `context`, stores features with the same bytes as an Example:
here all fields but the lists. The feature lists follow, with one Feature for each value:

    12 LENGTH                     SequenceExample.feature_lists; absent if the schema has no list
      0a LENGTH                   one entry of the map, entries in byte order of their names
        0a LENGTH NAME
        12 LENGTH                 FeatureList, empty for an empty list
          0a LENGTH FEATURE ...   for each value an Example's Feature with one value

This codec is in plain Python only. lockstep/storage/formats/tfrecord.py frames the records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.examples.column_checks import as_recorded
from lockstep.features.examples.example import (
    MASK,
    BytesLike,
    decode_examples,
    encode_examples,
    list_tag,
    read_varint,
    sized,
    varint,
)
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Columns
from lockstep.storage.errors import DataError
from lockstep.storage.formats.tfrecord import frame

_RAW = {"float32": "<f4", "float64": "<f8", "uint64": "<u8"}


class SequenceEncoder:
    """Encodes and frames SequenceExamples; same interface as lockstep.features.examples.codec.RecordEncoder."""

    def __init__(self, schema: Columns) -> None:
        self._schema = schema

    def sizes(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """The framed size of each row in bytes, (n,) int64."""
        return np.diff(self.encode(batch)[1])

    def encode(self, batch: pa.RecordBatch) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The framed records end to end, uint8, and where each begins and the last ends, (n + 1,) int64."""
        records = [frame(record) for record in encode_sequence_batch(self._schema, batch)]
        offsets = np.zeros(len(records) + 1, dtype=np.int64)
        np.cumsum([len(record) for record in records], out=offsets[1:])
        return np.frombuffer(b"".join(records), dtype=np.uint8), offsets


def encode_sequence_batch(schema: Columns, batch: pa.RecordBatch) -> list[bytes]:
    """Each row of the batch as a SequenceExample. Raises DataError as encode_examples does."""
    parts = _Parts(schema)
    context = encode_examples(parts.context, batch.select([field.name for field in parts.context]))
    columns = [_entries(field, batch.column(field.name)) for field in parts.lists]
    return [
        head + sized(0x12, b"".join(entries)) for head, *entries in zip(context, *columns, strict=True)
    ]  # a schema of SequenceExamples has a list


def decode_sequence_batch(schema: Columns, records: Sequence[BytesLike]) -> pa.RecordBatch:
    """Rows from SequenceExamples that encode_sequence_batch wrote, as columns of schema.arrow_schema().

    Raises DataError naming the record for all other bytes.
    """
    parts = _Parts(schema)
    contexts: list[bytes] = []
    lists: list[list[list[bytes]]] = [[] for _ in parts.lists]
    for number, record in enumerate(records):
        try:
            _split(bytes(record), parts, contexts, lists)
        except (IndexError, ValueError):
            raise _bad(number, "bytes in another form") from None
    context = decode_examples(parts.context, contexts)
    columns = {field.name: context.column(field.name) for field in parts.context}
    for field, rows in zip(parts.lists, lists, strict=True):
        columns[field.name] = _column(field, rows)
    batch = pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema.arrow_schema())
    for number, (record, again) in enumerate(zip(records, encode_sequence_batch(schema, batch), strict=True)):
        if again != bytes(record):
            raise _bad(number, "other bytes than the encoder writes for its values")
    return batch


class _Parts:
    """A schema's fields: those of the context, and the lists."""

    def __init__(self, schema: Columns) -> None:
        self._schema = schema
        self.context = Columns(tuple(field for field in schema if not field.is_list))

    @cached_property
    def lists(self) -> tuple[Field, ...]:
        """The feature lists, in byte order of their names."""
        return tuple(field for field in self._schema.in_byte_order if field.is_list)


def _entries(field: Field, column: pa.Array) -> list[bytes]:
    """Each row's entry of the map of feature lists."""
    column = as_recorded(field, column)
    flat = column.flatten()
    if column.null_count or flat.null_count:
        raise DataError(
            f"field `{field.name}` holds a null",
            got="null",
            allowed="lists of values; an empty list in place of null",
            next_step="Drop nulls from the lists.",
        )
    name = field.name.encode()
    key = sized(0x0A, name)
    values = [sized(0x0A, feature) for feature in _features(field, flat)]
    ends = np.cumsum(np.asarray(pc.list_value_length(column))).tolist()
    starts = [0, *ends[:-1]]
    return [
        sized(0x0A, key + sized(0x12, b"".join(values[start:end]))) for start, end in zip(starts, ends, strict=False)
    ]


def _features(field: Field, flat: pa.Array) -> Iterator[bytes]:
    """A Feature for each value."""
    tag = list_tag(field)
    if field.dtype in ("int64", "bool"):
        return (sized(tag, sized(0x0A, varint(int(value) & MASK))) for value in flat.to_pylist())
    if field.dtype in _RAW:  # bytes, because a Python float may lose a NaN's payload
        raw, size = np.asarray(flat).astype(_RAW[field.dtype]).tobytes(), 4 if field.dtype == "float32" else 8
        return (sized(tag, sized(0x0A, raw[at : at + size])) for at in range(0, len(raw), size))
    return (sized(tag, sized(0x0A, value)) for value in flat.cast(pa.binary()).to_pylist())


def _split(record: bytes, parts: _Parts, contexts: list[bytes], lists: list[list[list[bytes]]]) -> None:
    """Append a record's context to `contexts` and the bytes of its lists' values to `lists`."""
    end = _field(record, 0, 0x0A)[1]
    contexts.append(record[:end])
    body, stop = _field(record, end, 0x12)
    if stop != len(record):
        raise ValueError("more than context and lists")
    at = 0
    for field, rows in zip(parts.lists, lists, strict=True):
        entry, at = _field(body, at, 0x0A)
        name, rest = _field(entry, 0, 0x0A)
        if name != field.name.encode():
            raise ValueError("another list")
        features, _ = _field(entry, rest, 0x12)
        tag, values, place = list_tag(field), [], 0
        while place < len(features):
            feature, place = _field(features, place, 0x0A)
            values.append(_field(_field(feature, 0, tag)[0], 0, 0x0A)[0])
        rows.append(values)


def _column(field: Field, rows: list[list[bytes]]) -> pa.Array:
    flat = [value for row in rows for value in row]
    items: pa.Array
    try:
        if field.dtype in ("int64", "bool"):
            numbers = np.array([read_varint(value, 0)[0] for value in flat], dtype=np.uint64).view(np.int64)
            items = pa.array(numbers if field.dtype == "int64" else numbers.astype(bool))
        elif field.dtype in _RAW:
            raw = np.frombuffer(b"".join(flat), dtype=_RAW[field.dtype])
            items = pa.array(raw.astype(field.dtype)).cast(field.arrow_type.value_type)
        else:
            items = pa.array(flat, pa.binary()).cast(field.arrow_type.value_type)
    except (IndexError, ValueError, OverflowError, struct.error, pa.ArrowInvalid):
        raise _bad(None, f"values of `{field.name}` in another form") from None
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    if len(items) != offsets[-1]:
        raise _bad(None, f"values of `{field.name}` of another size")
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=field.arrow_type)


def _field(data: bytes, at: int, tag: int) -> tuple[bytes, int]:
    """The content of the length-delimited field with this tag at `at`, and its end."""
    if data[at] != tag:
        raise ValueError("another field")
    size, start = read_varint(data, at + 1)
    if start + size > len(data):
        raise IndexError("a field beyond its message")
    return data[start : start + size], start + size


def _bad(number: int | None, got: str) -> DataError:
    return DataError(
        "a record does not fit the schema"
        if number is None
        else f"record {number} of the batch does not fit the schema",
        got=got,
        allowed="a SequenceExample of exactly the schema's fields, in byte order",
        next_step="Run `lockstep verify URL`; if it finds no error, the shard was written with another schema.",
    )
