"""Parquet files with only pyarrow: its own batches, and fixed-size batches of arrays made from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema

Arrays = dict[str, Any]


def split_files(root: str | Path) -> list[Path]:
    """The Parquet shards of the split `train`."""
    return sorted((Path(root) / "split=train").glob("*.parquet"))


def arrow_batches(files: Sequence[Path], rows: int) -> Iterator[pa.RecordBatch]:
    """iter_batches over one file after another, page checksums looked at; each file ends with a short batch."""
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield from file.iter_batches(rows, use_threads=False)


def fixed_batches(files: Sequence[Path], schema: Schema, rows: int) -> Iterator[Arrays]:
    """Yield arrays of `rows` rows, images as (n, height, width, channels), put together where a file ends."""
    held: list[Arrays] = []
    missing = rows
    for batch in arrow_batches(files, rows):
        arrays = {field.name: _array(field, column) for field, column in zip(schema, batch.columns, strict=True)}
        start = 0
        while len(batch) - start >= missing:
            held.append({name: values[start : start + missing] for name, values in arrays.items()})
            yield _joined(held)
            start, held, missing = start + missing, [], rows
        if start < len(batch):
            held.append({name: values[start:] for name, values in arrays.items()})
            missing -= len(batch) - start
    if held:
        yield _joined(held)


def _array(field: Field, column: pa.Array) -> Any:
    if not field.is_tensor:
        return column.to_numpy()
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    pixels = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return pixels.reshape(len(column), *(size or 0 for size in field.shape))


def _joined(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
