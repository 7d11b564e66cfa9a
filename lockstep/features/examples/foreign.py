"""tf.Examples that others wrote, to columns: features in any order, some of them unknown, lists packed or not.

Our own shards hold exactly their schema's features in one form (lockstep/features/examples/codec.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.arrow import array_of, bits_of, checked_text, in_runs, of_type, rows_at_once
from lockstep.features.examples import foreign_plain
from lockstep.features.examples.column_checks import tensor_bytes
from lockstep.features.examples.foreign_plain import infer_schema, refuse_sequences
from lockstep.features.schema.fields import Field
from lockstep.storage.formats.tfrecord import FOOTER_BYTES, HEADER_BYTES

__all__ = ["decode_foreign_frames", "infer_schema", "refuse_sequences"]

_MAX_OFFSET = (1 << 31) - 1
_CELL_BYTES = 16  # where a feature's list begins and ends in a record
_Places = NDArray[np.int64]


def decode_foreign_frames(
    fields: Iterable[Field], data: NDArray[np.uint8], offsets: NDArray[np.int64], *, context_only: bool = False
) -> pa.RecordBatch:
    """Rows from any Examples, as a column for each of `fields` (a Schema gives its own), in their order.

    The records are framed, their checksums known to be right: `offsets` (n + 1,) from record_offsets. A feature that is
    not asked for is skipped. One that is missing, or present without a value, is null in a nullable field and empty in
    a list. Raises DataError naming record and field for a missing value in any other field, a list of another type,
    several values in a scalar, text that is not UTF-8, a tensor of another length, and for bytes that are no Example;
    for a SequenceExample too, which would lose its feature lists without a word, unless `context_only` asks for that.
    """
    asked = tuple(fields)

    def read(some: _Places) -> pa.RecordBatch | None:
        return _fast(asked, data, some[:-1] + HEADER_BYTES, some[1:] - FOOTER_BYTES)

    found = in_runs(offsets, rows_at_once(_CELL_BYTES * len(asked)), read)
    if found is not None:
        return found
    records = records_between(data, offsets)
    if not context_only:
        refuse_sequences(records)
    return foreign_plain.decode_foreign(asked, records)


def records_between(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[bytes]:
    """The records that lie framed between `offsets` (n + 1,)."""
    view = data.data
    return [bytes(view[start + HEADER_BYTES : end - FOOTER_BYTES]) for start, end in pairwise(offsets.tolist())]


def _fast(asked: tuple[Field, ...], data: NDArray[np.uint8], starts: _Places, ends: _Places) -> pa.RecordBatch | None:
    """The records by the kernels; None where the plain reader has to look at them."""
    from lockstep.features.examples import foreign_kernels as kernel

    names = [field.name.encode() for field in asked]
    name_ends = np.concatenate([[0], np.cumsum([len(name) for name in names], dtype=np.int64)]).astype(np.int64)
    kinds = np.array([foreign_plain.list_of(field) for field in asked], dtype=np.int64)
    found = np.empty((len(asked), len(starts), 2), dtype=np.int64)
    base = data.ctypes.data
    raw_names = np.frombuffer(b"".join(names), dtype=np.uint8)
    if not kernel.split(starts + base, ends + base, raw_names, name_ends, kinds, found):
        return None
    columns = []
    for field, kind, places in zip(asked, kinds.tolist(), found, strict=True):
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
    rows = np.cumsum(counts) - 1  # of each row, which value is its own
    return items.take(pa.array(rows, mask=counts == 0))


def _numbers(field: Field, item: pa.DataType, values: NDArray[Any]) -> pa.Array | None:
    if field.dtype != "bool":
        return array_of(item, len(values), None, values)
    if not ((values == 0) | (values == 1)).all():
        return None
    return array_of(item, len(values), None, bits_of(values.astype(np.uint8)))


def _bytes(field: Field, item: pa.DataType, values: NDArray[np.int64]) -> pa.Array | None:
    """Items of bytes from where they are and how long, (m, 2) int64."""
    from lockstep.features.examples import decode_lists

    places, sizes = np.ascontiguousarray(values.T)  # (m, 2) -> two (m,)
    wanted = tensor_bytes(field) if field.is_tensor else 8 if field.dtype in ("float64", "uint64") else None
    total = int(sizes.sum())
    if (wanted is not None and not (sizes == wanted).all()) or total > _MAX_OFFSET:
        return None
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    data = np.empty(total, dtype=np.uint8)
    decode_lists.gather(places, sizes, offsets, data.ctypes.data)
    if not field.is_tensor and wanted is not None:
        return array_of(item, len(sizes), None, data)
    return checked_text(array_of(item, len(sizes), None, offsets, data))
