"""Foreign tf.Examples, written by other programs, to columns: features in any order, some unknown, packed or not.

Our own shards have exactly their schema's features in one form (lockstep/features/examples/codec.py). Decision record:
docs/decisions/067-tfrecord-source.md.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.arrow import array_of, bits_of, checked_text, in_runs, of_type, rows_at_once
from lockstep.features.examples.example import EIGHT_BYTES, MASK, VARINT_MAX_BYTES, BytesLike, list_tag
from lockstep.features.schema.fields import Field
from lockstep.storage.errors import DataError
from lockstep.storage.formats.tfrecord import FOOTER_BYTES, HEADER_BYTES

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOAT, _INT64 = 1, 2, 3  # the numbers of Feature's lists
_LIST_NAMES = {_BYTES: "bytes_list", _FLOAT: "float_list", _INT64: "int64_list"}
_FEATURE_LISTS = 2, _LENGTH  # the second field of a SequenceExample: an Example has none
_Feature = tuple[int, list[Any]]  # the list's number and its values
_Lists = tuple[int, list[tuple[int, int]]]  # the same, with where the values begin and end
_MAX_OFFSET = (1 << 31) - 1
_CELL_BYTES = 16  # the start and end of a feature's list in a record
_Places = NDArray[np.int64]


def decode_foreign_frames(
    fields: Iterable[Field],
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    *,
    context_only: bool = False,
    known: Collection[str] | None = None,
) -> pa.RecordBatch:
    """Rows from any Examples: a column for each of `fields`, in their order.

    The records are framed and their checksums already checked: `offsets` (n + 1,) from record_offsets. Other features
    are skipped; with `known`, the names of all features that there should be, others are refused. A feature that is
    missing, or present without a value, is null in a nullable field and empty in a list. Raises DataError naming record
    and field for a missing value in any other field, a list of another type, several values in a scalar, text that is
    not UTF-8, a tensor of another length, and bytes that are not an Example. Unless `context_only`, it also refuses
    SequenceExamples, which would silently lose their feature lists.
    """
    asked = tuple(fields)

    def read(some: _Places) -> pa.RecordBatch | None:
        return fast_records(asked, data, some[:-1] + HEADER_BYTES, some[1:] - FOOTER_BYTES, known)

    found = in_runs(offsets, rows_at_once(_CELL_BYTES * max(len(asked), len(known or ()))), read)
    if found is not None:
        return found
    records = records_between(data, offsets)
    if not context_only:
        refuse_sequences(records)
    return decode_foreign(asked, records, known)


def records_between(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[bytes]:
    """The payloads of the framed records between `offsets` (n + 1,)."""
    view = data.data
    return [bytes(view[start + HEADER_BYTES : end - FOOTER_BYTES]) for start, end in pairwise(offsets.tolist())]


def fast_records(
    asked: tuple[Field, ...],
    data: NDArray[np.uint8],
    starts: _Places,
    ends: _Places,
    known: Collection[str] | None = None,
) -> pa.RecordBatch | None:
    """The records by the kernels; None if a kernel refuses one."""
    from lockstep.features.examples import foreign_kernels as kernel

    others = sorted(set(known or ()) - {field.name for field in asked})
    names = [*(field.name.encode() for field in asked), *(name.encode() for name in others)]
    name_ends = np.concatenate([[0], np.cumsum([len(name) for name in names], dtype=np.int64)]).astype(np.int64)
    kinds = np.array([*(list_tag(field) >> 3 for field in asked), *(kernel.ABSENT for _ in others)], dtype=np.int64)
    found = np.empty((len(names), len(starts), 2), dtype=np.int64)
    base = data.ctypes.data
    raw_names = np.frombuffer(b"".join(names) or b"\0", dtype=np.uint8)
    closed = known is not None
    if not kernel.split(starts + base, ends + base, raw_names.ctypes.data, name_ends, kinds, closed, found):
        return None
    columns = []
    for field, kind, places in zip(asked, kinds.tolist(), found, strict=False):  # without the others
        column = _column(field, kind, places)
        if column is None:
            return None
        columns.append(column)
    schema = pa.schema([pa.field(field.name, field.arrow_type, nullable=field.nullable) for field in asked])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(field: Field, kind: int, places: _Places) -> pa.Array | None:
    from lockstep.features.examples import foreign_kernels as kernel

    counts = np.empty(len(places), dtype=np.int64)
    if not kernel.counts(kind, places, counts):
        return None
    if not field.is_list and not (counts == 1).all() and not (field.nullable and (counts <= 1).all()):
        return None
    total = int(counts.sum())
    values: NDArray[Any] = np.empty((total, 2) if kind == kernel.BYTES else total, dtype=np.int64)
    if kind == kernel.FLOATS:
        values = np.empty(total, dtype=np.float32)
    kernel.values(kind, places, counts, values.ctypes.data)
    item = field.record_type.value_type if field.is_list else field.record_type
    items = _bytes(field, item, values) if kind == kernel.BYTES else _numbers(field, item, values)
    if items is None or total > _MAX_OFFSET:
        return None
    items = of_type(items, field.arrow_type.value_type if field.is_list else field.arrow_type)
    if field.is_list:
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.Array.from_buffers(
            field.arrow_type, len(counts), [None, pa.py_buffer(offsets)], null_count=0, children=[items]
        )
    if total == len(counts):
        return items
    rows = np.cumsum(counts) - 1  # the index of each row's value
    return items.take(pa.array(rows, mask=counts == 0))


def _numbers(field: Field, item: pa.DataType, values: NDArray[Any]) -> pa.Array | None:
    if field.dtype != "bool":
        return array_of(item, len(values), None, values)
    if not ((values == 0) | (values == 1)).all():
        return None
    return array_of(item, len(values), None, bits_of(values.astype(np.uint8)))


def _bytes(field: Field, item: pa.DataType, values: NDArray[np.int64]) -> pa.Array | None:
    """Items of bytes from their addresses and lengths, (m, 2) int64."""
    from lockstep.features.examples import decode_kernels

    places, sizes = np.ascontiguousarray(values.T)  # (m, 2) -> two (m,)
    wanted = field.tensor_bytes if field.is_tensor else 8 if field.dtype in ("float64", "uint64") else None
    total = int(sizes.sum())
    if (wanted is not None and not (sizes == wanted).all()) or total > _MAX_OFFSET:
        return None
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    data = np.empty(total, dtype=np.uint8)
    decode_kernels.gather(places, sizes, offsets, data.ctypes.data)
    if not field.is_tensor and wanted is not None:
        return array_of(item, len(sizes), None, data)
    return checked_text(array_of(item, len(sizes), None, offsets, data))


def decode_foreign(
    fields: Iterable[Field], records: Sequence[BytesLike], known: Collection[str] | None = None
) -> pa.RecordBatch:
    """Do what decode_foreign_frames does, in plain Python, for records of any kind without their frames."""
    asked = tuple(fields)
    names = {field.name.encode() for field in asked}
    if known is not None:
        _refuse_others(records, {name.encode() for name in known})
    parsed = [_parse(bytes(record), number, names) for number, record in enumerate(records)]
    columns = []
    for field in asked:
        name = field.name.encode()
        values = [_value(field, found.get(name), number) for number, found in enumerate(parsed)]
        columns.append(pa.array(values, type=field.arrow_type))
    schema = pa.schema([pa.field(field.name, field.arrow_type, nullable=field.nullable) for field in asked])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _refuse_others(records: Iterable[BytesLike], known: set[bytes]) -> None:
    for number, record in enumerate(records):
        for name in _lists_of(bytes(record), number, None):
            if name not in known:
                raise DataError(
                    f"record {number} of the batch has a feature that the schema lacks",
                    got=f"`{name.decode(errors='replace')}`",
                    allowed=", ".join(sorted(one.decode(errors="replace") for one in known))[:500],
                    next_step="Index the directory (again): lockstep index reads the names in all records. Or"
                    " infer the schema from more, by option sampleRecords, or name the columns: .schema(...).",
                )


def infer_schema(records: Iterable[BytesLike]) -> list[tuple[str, str, bool]]:
    """The features of a sample of Examples: (name, dtype, is_list) in byte order of the names.

    dtype is `int64`, `float32`, `string` if every value is UTF-8 without control characters other than tab and line
    ends, else `bytes`. A feature is a list if any record of the sample has several values or none for it. Raises
    DataError for a feature of different types, and for bytes that are not an Example.
    """
    kinds: dict[bytes, int] = {}
    lists: set[bytes] = set()
    binary: set[bytes] = set()
    for number, record in enumerate(records):
        for name, (kind, values) in _parse(bytes(record), number, None).items():
            if kinds.setdefault(name, kind) != kind:
                shown = name.decode(errors="replace")
                raise _bad(number, shown, _LIST_NAMES[kind], f"{_LIST_NAMES[kinds[name]]} as in the records before")
            if len(values) != 1:
                lists.add(name)
            if kind == _BYTES and name not in binary and not all(map(_is_text, values)):
                binary.add(name)
    found = []
    for name in sorted(kinds):
        dtype = {_FLOAT: "float32", _INT64: "int64", _BYTES: "bytes" if name in binary else "string"}[kinds[name]]
        found.append((_name(name), dtype, name in lists))
    return found


def refuse_sequences(records: Iterable[BytesLike]) -> None:
    """Raise DataError for a SequenceExample: read as an Example it would silently lose its feature lists."""
    for number, record in enumerate(records):
        if _has_lists(record):
            raise DataError(
                f"record {number} of the batch is a SequenceExample",
                got="feature lists",
                allowed="tf.train.Example; SequenceExamples only in Lockstep's datasets, whose manifest declares them",
                next_step="Read these files with TensorFlow, and write the rows as a dataset.",
            )


def _has_lists(record: BytesLike) -> bool:
    """Whether a message has a field 2 of bytes; False for bytes that are not a message, which the decoder refuses."""
    with suppress(IndexError):
        for number, wire, _, _ in message_fields(record, 0, len(record)):
            if (number, wire) == _FEATURE_LISTS:
                return True
    return False


def _is_text(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in "\t\r\n" for character in text)


def _name(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise _bad(None, repr(name), "a feature's name that is not UTF-8", "UTF-8") from None


def _value(field: Field, feature: _Feature | None, number: int) -> Any:
    values: list[Any] = []
    if feature is not None:
        kind, values = feature
        wanted = list_tag(field) >> 3
        if kind != wanted:
            raise _bad(number, field.name, _LIST_NAMES[kind], f"{_LIST_NAMES[wanted]} for {field.dtype}")
        values = [_converted(field, value, number) for value in values]
    if field.is_list:
        return values
    if not values and field.nullable:
        return None
    if len(values) != 1:
        raise _bad(number, field.name, f"{len(values)} values", "exactly 1" + (" or none" if field.nullable else ""))
    return values[0]


def _converted(field: Field, value: Any, number: int) -> Any:
    if field.is_tensor:
        if len(value) != field.tensor_bytes:
            allowed = f"{field.tensor_bytes} bytes: shape {field.shape} of {field.dtype}"
            raise _bad(number, field.name, f"{len(value)} bytes", allowed)
    elif field.dtype == "string":
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _bad(number, field.name, f"{value[:40]!r}", "UTF-8; declare the field as bytes") from None
    elif field.dtype in EIGHT_BYTES:
        if len(value) != 8:
            raise _bad(number, field.name, f"{len(value)} bytes", f"8 little-endian bytes for {field.dtype}")
        return struct.unpack(EIGHT_BYTES[field.dtype], value)[0]
    elif field.dtype == "bool":
        if value not in (0, 1):
            raise _bad(number, field.name, str(value), "0 or 1 for bool")
        return bool(value)
    return value


def _parse(record: bytes, number: int, names: set[bytes] | None) -> dict[bytes, _Feature]:
    """The features of an Example that are in `names` (None: all) and have a list."""
    try:
        return {
            name: (kind, [value for start, end in spans for value in _values(record, kind, start, end)])
            for name, (kind, spans) in _lists_of(record, number, names).items()
        }
    except (IndexError, struct.error):
        raise _malformed(number) from None


def _lists_of(record: bytes, number: int, names: set[bytes] | None) -> dict[bytes, _Lists]:
    """Find the lists of an Example's features: where their values are, not the values."""
    found: dict[bytes, _Lists] = {}
    try:
        for tag, wire, start, end in message_fields(record, 0, len(record)):
            if tag == 1 and wire == _LENGTH:
                for entry_tag, entry_wire, at, stop in message_fields(record, start, end):
                    if entry_tag == 1 and entry_wire == _LENGTH:
                        _entry(record, at, stop, names, found)
    except IndexError:
        raise _malformed(number) from None
    return found


def _malformed(number: int) -> DataError:
    return _bad(number, None, "bytes in another form", "a serialised tf.train.Example")


def _entry(record: bytes, start: int, end: int, names: set[bytes] | None, found: dict[bytes, _Lists]) -> None:
    """Add one entry of the map to `found`; an entry without a list removes an earlier one of its name."""
    name = b""
    feature: _Lists | None = None
    for tag, wire, at, stop in message_fields(record, start, end):
        if tag == 1 and wire == _LENGTH:
            name = record[at:stop]
        elif tag == 2 and wire == _LENGTH:
            for kind, kind_wire, list_start, list_end in message_fields(record, at, stop):
                if kind in _LIST_NAMES and kind_wire == _LENGTH:
                    before = feature[1] if feature is not None and feature[0] == kind else []
                    feature = (kind, [*before, (list_start, list_end)])
    if names is None or name in names:
        found.pop(name, None)
        if feature is not None:
            found[name] = feature


def _values(record: bytes, kind: int, start: int, end: int) -> list[Any]:
    values: list[Any] = []
    for tag, wire, at, stop in message_fields(record, start, end):
        if tag != 1:
            continue
        if kind == _BYTES and wire == _LENGTH:
            values.append(record[at:stop])
        elif kind == _FLOAT and wire in (_LENGTH, _FIXED32):
            values.extend(struct.unpack(f"<{(stop - at) // 4}f", record[at:stop]))
        elif kind == _INT64 and wire in (_LENGTH, _VARINT):
            while at < stop:
                value, at = _varint(record, at, stop)
                values.append(value - (1 << 64) if value >> 63 else value)
    return values


def message_fields(data: BytesLike, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, start and end of the payload. IndexError for malformed bytes."""
    at = start
    while at < end:
        key, at = _varint(data, at, end)
        wire, stop = key & 7, at
        if wire == _VARINT:
            _, stop = _varint(data, at, end)
        elif wire == _LENGTH:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire in (_FIXED32, _FIXED64):
            stop = at + (4 if wire == _FIXED32 else 8)
        else:  # groups, which proto3 does not have, and undefined types
            raise IndexError("an unknown wire type")
        if stop > end or key >> 3 == 0:
            raise IndexError("a field leaves its message")
        yield key >> 3, wire, at, stop
        at = stop


def _varint(data: BytesLike, at: int, end: int) -> tuple[int, int]:
    value = 0
    for index in range(min(VARINT_MAX_BYTES, end - at)):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value & MASK, at + index + 1
    raise IndexError("a varint without an end")


def _bad(number: int | None, name: str | None, got: str, allowed: str) -> DataError:
    place = ("" if number is None else f"record {number} of the batch") + ("" if name is None else f", field `{name}`")
    return DataError(
        f"{place.removeprefix(', ')} cannot be read as declared",
        got=got,
        allowed=allowed,
        next_step="Declare the schema as the records are, or leave the field out.",
    )
