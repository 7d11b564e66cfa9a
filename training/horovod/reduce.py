"""Sums, means, minima and maxima of tensors over ranks: `hvd.allreduce` and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from training.comm.base import DTYPES, FLOATS, Communicator, Op
from training.horovod.gather import allgather
from training.horovod.place import absent, call, check, here, run


class Compressor:
    """How a tensor is made smaller before it is reduced, and brought back afterwards."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The reduced tensor in its own dtype again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floats of 32 and 64 bits as float16: sums are rounded to 11 bits, and above 65,504 they are infinite."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (
            (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype in (tf.float32, tf.float64) else (tensor, None)
        )

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The known ways."""

    none = NoneCompressor
    fp16 = FP16Compressor


Array = NDArray[Any]
# Integers that the communicator does not know, in one that holds all their values; sums wrap when they go back.
_WIDER = {np.dtype(name): np.dtype(np.int64) for name in ("int8", "int16", "uint16", "uint32")}


class ReduceOp(Enum):
    """How values of ranks become one."""

    Average = "mean"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Adasum = "adasum"


Average, Sum, Min, Max, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Adasum


def allreduce(
    tensor: Any,
    average: bool | str | None = None,
    device_dense: str | bool = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks; returns a tensor of its shape and dtype (tf.IndexedSlices for tf.IndexedSlices).

    The mean where neither `op` nor `average` says otherwise; a mean of integers is cut off. A name may stand second
    and `average` third, as in horovod.tensorflow.keras. Values are multiplied by the factors before and after. Can be
    differentiated, but for Min and Max. Raises TrainingFailedError where the ranks' calls differ.
    """
    if isinstance(average, str):
        average, name = None, name or average
        if isinstance(device_dense, bool):
            average, device_dense = device_dense, ""
    check("allreduce", device_dense=device_dense, device_sparse=device_sparse, process_set=process_set)
    how = op_of(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_slices(tensor, how, name, prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], None, "", "", compression, how, prescale_factor, postscale_factor, name)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """`allreduce` of several dense tensors at once: one message for each dtype."""
    check("grouped_allreduce", device_dense=device_dense, device_sparse=device_sparse, process_set=process_set)
    how = op_of(op, average)
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in dense:
        _check_dtype(np.dtype(tensor.dtype.as_numpy_dtype))
    if not dense:
        return []

    @tf.custom_gradient
    def reduce(*inputs: tf.Tensor) -> Any:
        packed = [compression.compress(tensor) for tensor in inputs]
        small = [tensor for tensor, _ in packed]

        def reduced(*arrays: Array) -> list[Array]:
            return _reduce_arrays(arrays, how, prescale_factor, postscale_factor, name)

        results = run(reduced, small, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in small])

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if how not in (Average, Sum):
                absent(f"gradient of allreduce(op={how.name})")
            label = f"gradient of {name or 'allreduce'}"
            return grouped_allreduce(upstream, None, "", "", compression, how, prescale_factor, postscale_factor, label)

        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, packed, strict=True)], backward

    results = reduce(*dense)
    return list(results) if isinstance(results, list | tuple) else [results]


def op_of(op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """The operation of Horovod's two ways to name it. Raises ConfigError for both at once and for Adasum."""
    if op is not None and average is not None:
        raise ConfigError(
            "allreduce has two arguments for one thing",
            got=f"average={average} and op={op}",
            allowed="one of them; op is the newer",
            next_step="Leave `average` out.",
        )
    how = op if op is not None else (Sum if average is False else Average)
    if how is Adasum:
        absent("op=Adasum", instead="Use op=hvd.Average with a learning rate scaled by hvd.size().")
    return ReduceOp(how)


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype not in DTYPES and dtype not in _WIDER:
        raise ConfigError(
            "allreduce got a dtype that it cannot sum",
            got=str(dtype),
            allowed=", ".join(str(known) for known in (*DTYPES, *_WIDER)),
            next_step="Cast the tensor first.",
        )


def _reduce_arrays(
    arrays: Sequence[Array], how: ReduceOp, before: float, after: float, name: str | None
) -> list[Array]:
    shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    text = f"allreduce {name or ''} of {shapes} by {how.name}, factors {before:g} and {after:g}"

    def reduce(communicator: Communicator, _: list[int]) -> list[Array]:
        results: list[Array | None] = [None] * len(arrays)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            mine = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = _buffer(communicator, sum(arrays[i].size for i in mine), _WIDER.get(dtype, dtype))
            place = 0
            for i in mine:
                flat[place : place + arrays[i].size] = arrays[i].reshape(-1)
                place += arrays[i].size
            _scale(flat, before)
            whole = flat.dtype not in FLOATS and how is Average
            communicator.all_reduce(flat, cast(Op, (Sum if whole else how).value))
            if whole:
                flat[:] = np.trunc(flat / communicator.num_ranks)
            _scale(flat, after)
            place = 0
            for i in mine:  # copies: the buffer is used again, and a tensor may keep an array's memory
                results[i] = flat[place : place + arrays[i].size].astype(dtype).reshape(arrays[i].shape)
                place += arrays[i].size
        return results  # type: ignore[return-value]  # every place is filled above

    reduced: list[Array] = call(text, 0, reduce)
    return reduced


def _buffer(communicator: Communicator, size: int, dtype: np.dtype[Any]) -> Array:
    """A buffer that is kept: a training reduces the same number of elements at every step."""
    buffers = here().buffers
    found = buffers.get(dtype)
    if found is None or found.size != size:
        found = buffers[dtype] = communicator.allocate(size, dtype)
    return found


def _scale(flat: Array, factor: float) -> None:
    if factor != 1.0:
        flat[:] = flat * flat.dtype.type(factor) if flat.dtype in FLOATS else np.trunc(flat * factor)


def _reduce_slices(
    slices: tf.IndexedSlices, how: ReduceOp, name: str | None, before: float, after: float
) -> tf.IndexedSlices:
    """The rows of all ranks, one after another: whoever applies them adds rows of one index."""
    if how not in (Average, Sum):
        absent(f"allreduce of tf.IndexedSlices by {how.name}", instead="Use op=hvd.Average or op=hvd.Sum.")
    factor = before * after / (here().world.num_ranks if how is Average else 1)
    values = allgather(slices.values, f"{name or 'slices'}, values")
    indices = allgather(slices.indices, f"{name or 'slices'}, indices")
    return tf.IndexedSlices(values * tf.cast(factor, values.dtype), indices, slices.dense_shape)
