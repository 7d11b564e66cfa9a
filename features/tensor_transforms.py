"""Tensors and images as a model is fed with them: as they lie, decoded, or brought to a mean and a deviation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from features.column_checks import tensor_bytes
from features.encodings import Encoding
from features.images import decode_image
from features.schema import Field
from features.signature import TensorSpec
from features.transforms import Plan, Transform, narrowed, null_error
from storage.errors import DataError


def tensor(field: Field) -> Plan:
    """The tensor as it was stored; with `normalise`, as float32."""
    shape = tuple(size for size in field.shape if size is not None)
    return _plan(field, shape, field.dtype, _stored(field, shape))


def image(field: Field, encoding: Encoding) -> Plan:
    """The pixels of encoded image files, decoded when they are read: uint8, or float32 where they are normalised."""
    height, width, channels = (int(encoding[key]) for key in ("height", "width", "channels"))
    fit = str(encoding.get("fit", "resize"))

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count:
            raise null_error(field)
        out = np.empty((len(column), height, width, channels), dtype=np.uint8)
        for row, data in enumerate(column):  # decoding costs a thousand times as much as a call
            out[row] = decode_image(data.as_py(), (height, width), channels, fit)
        return out

    return _plan(field, (height, width, channels), "uint8", transform)


def _plan(field: Field, shape: tuple[int, ...], dtype: str, transform: Transform) -> Plan:
    encoding = field.encoding or {}
    if "mean" not in encoding:
        return {field.name: (TensorSpec(shape=shape, dtype=dtype), transform)}
    # float32 is exact enough for pixels and for what is float32 itself; the others are rounded once, at the end.
    work = np.dtype(np.float32 if dtype in ("uint8", "float32") else np.float64)
    deviation = np.array(encoding["deviation"], dtype=np.float64)
    scale = (1.0 / (float(encoding.get("divide_by", 1)) * deviation)).astype(work)
    shift = (-np.array(encoding["mean"], dtype=np.float64) / deviation).astype(work)

    def normalised(column: pa.Array) -> NDArray[Any]:
        # (n, *shape) * (1,) or (channels,): the last axis has the channels
        values = transform(column).astype(work)
        values *= scale
        values += shift
        return values if work == np.float32 else narrowed(field, values, np.dtype(np.float32))

    return {field.name: (TensorSpec(shape=shape, dtype="float32"), normalised)}


def _stored(field: Field, shape: tuple[int, ...]) -> Transform:
    dtype = np.dtype(field.dtype).newbyteorder("<")
    wanted = tensor_bytes(field)

    def transform(column: pa.Array) -> NDArray[Any]:
        if column.null_count:
            raise null_error(field)
        offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
        if len(column) and not bool((np.diff(offsets) == wanted).all()):
            raise DataError(
                f"a tensor of field `{field.name}` has the wrong length",
                got=f"{int(np.diff(offsets).min())} to {int(np.diff(offsets).max())} bytes",
                allowed=f"{wanted} bytes",
                next_step="Run `python -m jobs.verify URL`.",
            )
        if not len(column):
            return np.zeros((0, *shape), dtype=field.dtype)
        data = np.frombuffer(column.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
        # (n * bytes,) uint8 -> (n, *shape): rows lie one after another; a copy, so that Arrow's memory can go
        return data.view(dtype).reshape(len(column), *shape).astype(field.dtype, copy=True)

    return transform
