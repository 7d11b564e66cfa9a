"""A split as plain arrays, batch by batch in the order of its shards: for reading data, not for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.reading.reader import SplitReader

_POOLED_BYTES = 1 << 20

Arrays = dict[str, npt.NDArray[Any] | pa.Array]


def split_arrays(dataset_url: str, split: str, batch_rows: int) -> Iterator[Arrays]:
    """The records of a split, `batch_rows` at a time (the last batch may be shorter), by field name.

    Numbers are (n,), tensors (n, *shape) of their dtype; strings, bytes, lists and nullable fields are Arrow arrays,
    since NumPy cannot represent them without loss. Batches are read-only; most are views of a chunk, which they keep
    alive: a block. Raises CorruptionError naming file, record and offset, and ConfigError for batches of less than one
    row.
    """
    _check_rows(batch_rows)
    manifest = load_dataset(dataset_url)
    schema = Schema.from_json(manifest.schema)
    reader = SplitReader(dataset_url, manifest, split, schema)
    chunks = in_order(reader)
    arrays = ({field.name: _array(field, chunk.column(field.name)) for field in schema} for chunk in chunks)
    yield from cut(arrays, batch_rows)


def in_order(reader: SplitReader) -> Iterator[pa.RecordBatch]:
    """All records in the order of the shards, a block at a time."""
    return reader.sequence(map(reader.table.run, range(reader.table.num_blocks)))


def cut(chunks: Iterable[Arrays], rows: int) -> Iterator[Arrays]:
    """Cut the rows into batches of `rows` each; the last one may be shorter.

    A batch within a chunk is a view of it; a batch across several is copied. Raises ConfigError for `rows` < 1.
    """
    _check_rows(rows)
    held: list[Arrays] = []
    missing = rows
    for chunk in chunks:
        size, start = len(next(iter(chunk.values()))), 0
        while size - start >= missing:
            piece = _part(chunk, start, start + missing)
            yield _joined([*held, piece]) if held else piece
            start, held, missing = start + missing, [], rows
        if start < size:
            held.append(_part(chunk, start, size))
            missing -= size - start
    if held:
        yield _joined(held)


def _part(arrays: Arrays, start: int, stop: int) -> Arrays:
    return {name: values[start:stop] for name, values in arrays.items()}


def _joined(parts: list[Arrays]) -> Arrays:
    found: Arrays = {}
    for name, first in parts[0].items():
        if isinstance(first, np.ndarray):
            found[name] = _concatenated([part[name] for part in parts])
        else:
            found[name] = pa.concat_arrays([part[name] for part in parts])
    return found


def _concatenated(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """np.concatenate, large arrays in memory of Arrow's pool: NumPy's is given back and cleared at each array, once
    TensorFlow has worked in the process."""
    size = sum(part.nbytes for part in parts)
    if size < _POOLED_BYTES:
        joined = np.concatenate(parts)
    else:
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        memory = np.frombuffer(pa.allocate_buffer(size), dtype=parts[0].dtype).reshape(shape)
        joined = np.concatenate(parts, out=memory)
    joined.flags.writeable = False
    return joined


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise ConfigError(
            "batches must have rows", got=str(rows), allowed="1 or more", next_step="Ask for batches of 1 row or more."
        )


def _array(field: Field, column: pa.Array) -> npt.NDArray[Any] | pa.Array:
    if field.is_list or field.nullable or field.dtype in ("string", "bytes"):
        return column
    if field.dtype == "uint64":
        return column.cast(field.record_type).to_numpy()
    if not field.is_tensor:
        values = column.to_numpy(zero_copy_only=field.dtype != "bool")
        values.flags.writeable = False  # the bits of bool were copied out
        return values
    shape = tuple(size for size in field.shape if size is not None)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    sizes, wanted = np.diff(offsets), field.tensor_bytes
    if not bool((sizes == wanted).all()):
        raise DataError(
            f"a tensor of field `{field.name}` has the wrong length",
            got=f"{int(sizes.min())} to {int(sizes.max())} bytes",
            allowed=f"{wanted} bytes",
            next_step="Run `lockstep verify URL`.",
        )
    data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    # (n * bytes,) uint8 -> (n, *shape): tensors lie one after another
    return data.view(np.dtype(field.dtype).newbyteorder("<")).reshape(len(column), *shape)
