"""Tensors as arrays for Petastorm's readers, which see them as the bytes that they are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.features.schema.schema import Schema


def tensors(schema: Schema, columns: Sequence[str] | None = None) -> Any:
    """A TransformSpec for make_reader or make_batch_reader that makes arrays of the tensors of `schema`.

    Each becomes an array of its declared dtype and shape, (n, *shape) in a batch. `columns` are the names that the
    reader gets as `schema_fields`, None where it gets none. Call etl.petastorm.enable() before. Raises
    ConfigError for a column that the schema lacks.
    """
    from petastorm import TransformSpec

    wanted = list(schema) if columns is None else [schema[name] for name in columns]
    shapes = {field.name: (np.dtype(field.dtype), field.shape) for field in wanted if field.is_tensor}
    return TransformSpec(
        partial(_decode, shapes),
        edit_fields=[(name, dtype.type, shape, False) for name, (dtype, shape) in shapes.items()],
    )


def _decode(shapes: dict[str, tuple[np.dtype[Any], tuple[int | None, ...]]], rows: Any) -> Any:
    """The same for a row (dict) of make_reader and for the rows (DataFrame) of make_batch_reader."""
    for name, (dtype, shape) in shapes.items():
        if isinstance(rows, dict):
            rows[name] = np.frombuffer(rows[name], dtype.newbyteorder("<")).astype(dtype).reshape(shape)
            continue
        data = b"".join(rows[name])
        rows[name] = list(np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(len(rows), *shape))
    return rows
