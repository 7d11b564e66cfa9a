"""A split as plain arrays, batch by batch in the order of its shards: for reading it, not for feeding a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from features.example import tensor_bytes
from features.schema import Field, Schema
from storage.errors import ConfigError, DataError
from storage.manifest import load_dataset
from training.reader import SplitReader

# Small batches are cut out of chunks of so many bytes on disk: a column's way out of Arrow costs a microsecond.
_CHUNK_BYTES = 2 << 20

Arrays = dict[str, npt.NDArray[Any] | pa.Array]


def split_arrays(dataset_url: str, split: str, batch_rows: int) -> Iterator[Arrays]:
    """The records of a split, `batch_rows` at a time (the last batch is as short as it comes), by field name.

    Numbers come as (n,), tensors as (n, *shape) of their dtype; strings, bytes, lists and nullable fields as Arrow
    arrays, since NumPy has no form for them that keeps everything. Read-only. Raises CorruptionError naming file,
    record and offset, as all reading does, and ConfigError for batches of less than one row.
    """
    _check_rows(batch_rows)
    manifest = load_dataset(dataset_url)
    schema = Schema.from_json(manifest.schema)
    reader = SplitReader(dataset_url, manifest, split, schema)
    shards = manifest.splits[split].shards
    record_bytes = max(1, sum(shard.bytes for shard in shards) // max(1, sum(shard.records for shard in shards)))
    chunk_rows = batch_rows * max(1, _CHUNK_BYTES // (batch_rows * record_bytes))
    for chunk in rebatched(reader.in_order(chunk_rows), chunk_rows):
        arrays = {field.name: _array(field, chunk.column(field.name)) for field in schema}
        for start in range(0, len(chunk), batch_rows):
            yield {name: values[start : start + batch_rows] for name, values in arrays.items()}


def rebatched(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `rows` each; only rows at the seams are copied. Raises ConfigError for `rows` < 1."""
    _check_rows(rows)
    held: list[pa.RecordBatch] = []
    missing = rows
    for batch in batches:
        start = 0
        while len(batch) - start >= missing:
            piece = batch.slice(start, missing)
            yield pa.concat_batches([*held, piece]) if held else piece
            start, held, missing = start + missing, [], rows
        if start < len(batch):
            held.append(batch.slice(start))
            missing -= len(batch) - start
    if held:
        yield pa.concat_batches(held)


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise ConfigError(
            "batches must have rows", got=str(rows), allowed="1 or more", next_step="Ask for batches of 1 row or more."
        )


def _array(field: Field, column: pa.Array) -> npt.NDArray[Any] | pa.Array:
    if field.is_list or field.nullable or field.dtype in ("string", "bytes"):
        return column
    if not field.is_tensor:
        return column.to_numpy(zero_copy_only=field.dtype != "bool")
    shape = tuple(size for size in field.shape if size is not None)
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    sizes, wanted = np.diff(offsets), tensor_bytes(field)
    if not bool((sizes == wanted).all()):
        raise DataError(
            f"a tensor of field `{field.name}` has the wrong length",
            got=f"{int(sizes.min())} to {int(sizes.max())} bytes",
            allowed=f"{wanted} bytes",
            next_step="Run `python -m jobs.verify URL`.",
        )
    data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    # (n * bytes,) uint8 -> (n, *shape): tensors lie one after another
    return data.view(np.dtype(field.dtype).newbyteorder("<")).reshape(len(column), *shape)
