"""Tensors and images as a model is fed with them: as they lie, decoded, or brought to a mean and a deviation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.encode.making import Early, Lists, Made
from lockstep.features.encode.refused_row import span
from lockstep.features.encode.transforms import Plan, narrowed, null_error
from lockstep.features.examples.column_checks import tensor_bytes
from lockstep.features.images.decode_many import decode_files
from lockstep.features.schema.encodings import Encoding
from lockstep.features.schema.fields import Field
from lockstep.features.schema.signature import TensorSpec
from lockstep.storage.errors import DataError


def tensor(field: Field) -> Plan:
    """The tensor as it was stored; with `normalise`, as float32."""
    shape = tuple(size for size in field.shape if size is not None)
    row = TensorSpec(shape=shape, dtype=field.dtype)
    made = Made(spec=row, early=_stored(field, shape), row=row, stored=field.dtype, borrowed=True)
    return {field.name: _scaled(field, made)}


def image(field: Field, encoding: Encoding) -> Plan:
    """The pixels of encoded image files, decoded when they are read: uint8, or float32 where they are normalised."""
    height, width, channels = (int(encoding[key]) for key in ("height", "width", "channels"))
    fit = str(encoding.get("fit", "resize"))

    def files(column: pa.Array) -> Lists:
        if column.null_count:
            raise null_error(field)
        if not len(column):
            return Lists(np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        data = column.buffers()[2]
        return Lists(np.frombuffer(b"" if data is None else data, dtype=np.uint8), offsets.astype(np.int64))

    def decoded(lists: Lists) -> NDArray[Any]:
        return decode_files(lists.values, lists.offsets, (height, width), channels, fit)

    pixels = TensorSpec(shape=(height, width, channels), dtype="uint8")
    byte = TensorSpec(shape=(), dtype="uint8")
    return {field.name: _scaled(field, Made(spec=pixels, early=files, row=byte, lists=True, late=decoded))}


def _scaled(field: Field, made: Made) -> Made:
    """The same array brought to a mean and a deviation, where the field asks for it."""
    encoding, shape, dtype = field.encoding or {}, made.spec.shape, made.spec.dtype
    if "mean" not in encoding:
        return made
    # float32 is exact enough for pixels and for what is float32 itself; the others are rounded once, at the end.
    work = np.dtype(np.float32 if dtype in ("uint8", "float32") else np.float64)
    deviation = np.array(encoding["deviation"], dtype=np.float64)
    scale = (1.0 / (float(encoding.get("divide_by", 1)) * deviation)).astype(work)
    shift = (-np.array(encoding["mean"], dtype=np.float64) / deviation).astype(work)

    def normalised(rows: Any) -> NDArray[Any]:
        # (n, *shape) * (1,) or (channels,): the last axis has the channels
        values = (rows if made.late is None else made.late(rows)).astype(work)
        values *= scale
        values += shift
        return values if work == np.float32 else narrowed(field, values, np.dtype(np.float32))

    return replace(made, spec=TensorSpec(shape=shape, dtype="float32"), late=normalised)


def _stored(field: Field, shape: tuple[int, ...]) -> Early:
    dtype = np.dtype(field.dtype).newbyteorder("<")
    wanted = tensor_bytes(field)

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count:
            raise null_error(field)
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if len(column) and not bool((np.diff(offsets) == wanted).all()):
            raise DataError(
                f"a tensor of field `{field.name}` has the wrong length",
                got=f"{span(np.diff(offsets).min(), np.diff(offsets).max())} bytes",
                allowed=f"{wanted} bytes",
                next_step="Run `python -m jobs.verify URL`.",
            )
        if not len(column):
            return np.zeros((0, *shape), dtype=field.dtype)
        data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
        # (n * bytes,) uint8 -> (n, *shape): rows lie one after another; a view of Arrow's memory
        return data.view(dtype).reshape(len(column), *shape)

    return transform
