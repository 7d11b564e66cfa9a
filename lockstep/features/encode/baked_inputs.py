"""What a model is fed of a baked field: its values as they lie, ids spread into columns or padded where that was asked.

Nothing is hashed, looked up or scaled again: the values were made by lockstep/features/encode/bake.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.encode.refused_row import span
from lockstep.features.encode.tensor_transforms import tensor
from lockstep.features.encode.transforms import Columns, Plan, as_columns, as_sequence, null_error, number
from lockstep.features.schema.encodings import output_of
from lockstep.features.schema.fields import Field
from lockstep.storage.errors import DataError


def baked(field: Field) -> Plan:
    """The arrays that the declared encoding would give, of what is stored."""
    assert field.encoding is not None
    encoding, ids = field.encoding["raw"]["encoding"] or {}, field.encoding.get("ids")
    columns, size = (None, 0) if ids is None else (_columns(field, ids), ids - 1)
    if encoding.get("kind") == "sequence":
        return as_sequence(field, encoding, columns, size)
    if columns is not None:
        return as_columns(field, output_of(encoding, is_list=field.is_list), columns, size)
    return tensor(field) if field.is_tensor else number(field, {"dtype": field.dtype})


def _columns(field: Field, ids: int) -> Columns:
    def columns(column: pa.Array) -> NDArray[np.int64]:
        if column.null_count:
            raise null_error(field)
        found: NDArray[Any] = np.asarray(column)
        if len(found) and not (found.min() >= 0 and found.max() < ids):
            raise DataError(
                f"field `{field.name}` holds an id that there is not",
                got=span(found.min(), found.max()),
                allowed=f"0 to {ids - 1}",
                next_step="Run `python -m jobs.verify URL`.",
            )
        return found - 1

    return columns
