"""Tensors of all ranks reduced, joined or replaced by one rank's: `hvd.allreduce`, `hvd.allgather`, `hvd.broadcast`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from training.comm.base import DTYPES, FLOATS, Communicator, Op
from training.horovod.runtime import absent, call, check, run, runtime


class Compressor:
    """Makes a tensor smaller before it is reduced, and restores its dtype afterwards."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to reduce, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The reduced tensor in its own dtype again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""

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
    """The known compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor


Array = NDArray[Any]
# The wider dtype for integers that the communicator does not know; sums wrap when they are converted back.
_WIDER = {np.dtype(name): np.dtype(np.int64) for name in ("int8", "int16", "uint16", "uint32")}


class ReduceOp(Enum):
    """How the values of all ranks are combined."""

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

    The mean unless `op` or `average` is given; a mean of integers is truncated. The name may be second and `average`
    third, as in horovod.tensorflow.keras. Values are multiplied by the factors before and after. Differentiable,
    except for Min and Max. Raises TrainingFailedError if the ranks' calls differ.
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
    """`allreduce` of several dense tensors at once, with one message per dtype."""
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


def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None) -> Any:
    """The tensors of all ranks, joined along their first dimension, which may differ; a scalar counts as one row.

    Differentiable. Raises TrainingFailedError if the ranks' calls, dtypes or other dimensions differ.
    """
    check("allgather", process_set=process_set)
    value = tf.convert_to_tensor(tensor)
    _check_numbers("allgather", value)
    if value.shape.rank == 0:
        value = tf.reshape(value, (1,))

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        shape = tf.TensorShape([None, *rows.shape[1:]]) if rows.shape.rank is not None else None
        specs = [tf.TensorSpec(shape, rows.dtype), tf.TensorSpec((), tf.int64)]
        joined, start = run(partial(_gather, name or ""), [rows], specs)

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            total = allreduce(upstream, op=Sum, name=f"gradient of {name or 'allgather'}")
            return total[start : start + tf.shape(rows, tf.int64)[0]]

        return joined, backward

    return gather(value)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r, in order; returns the rows that the ranks have sent here.

    `splits` (num_ranks,) integers add up to the rows; None: equal parts. With `splits` the result is (rows, rows from
    each rank (num_ranks,) int32), as in Horovod. Differentiable. Raises ConfigError for splits that do not fit,
    TrainingFailedError if the ranks' calls, dtypes or other dimensions differ.
    """
    check("alltoall", process_set=process_set)
    value = tf.convert_to_tensor(tensor)
    _check_numbers("alltoall", value)
    counts = tf.zeros((0,), tf.int64) if splits is None else tf.cast(splits, tf.int64)

    @tf.custom_gradient
    def exchange(rows: tf.Tensor) -> Any:
        shape = tf.TensorShape([None, *rows.shape[1:]])
        specs = [tf.TensorSpec(shape, rows.dtype), tf.TensorSpec((None,), tf.int64)]
        received, sources = run(partial(_exchange, name or "", splits is None), [rows, counts], specs)

        def backward(upstream: tf.Tensor, *_: Any) -> tf.Tensor:
            back = partial(_exchange, f"gradient of {name or 'alltoall'}", False)
            return run(back, [upstream, sources], specs)[0]

        return (received, sources), backward

    received, sources = exchange(value)
    return received if splits is None else (received, tf.cast(sources, tf.int32))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> tf.Tensor:
    """Rank `root_rank`'s tensor on all ranks; shapes and dtypes must be equal. Differentiable."""
    check("broadcast", process_set=process_set)
    value = tf.convert_to_tensor(tensor)
    _check_numbers("broadcast", value)

    @tf.custom_gradient
    def send(mine: tf.Tensor) -> Any:
        spec = tf.TensorSpec(mine.shape, mine.dtype)
        (theirs,) = run(partial(_broadcast_arrays, root_rank, name or ""), [mine], [spec])

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            total = allreduce(upstream, op=Sum, name=f"gradient of {name or 'broadcast'}")
            return total if runtime().world.rank == root_rank else tf.zeros_like(total)

        return theirs, backward

    return send(value)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Assign rank `root_rank`'s values to Keras or TensorFlow variables on all ranks, in one message.

    Ranks must have the same variables in the same order; in eager code or inside a tf.function.
    """
    check("broadcast_variables", process_set=process_set)
    found = list(variables)
    if not found:
        return
    values = [tf.convert_to_tensor(variable) for variable in found]
    # Without the model's name, which a new Sequential has and a loaded one lacks.
    paths = [str(getattr(variable, "path", variable.name)).split("/") for variable in found[:3]]
    names = ", ".join("/".join(path[-2:]) for path in paths)
    text = f"variables ({len(found)}: {names}...)"
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
    theirs = run(partial(_broadcast_arrays, root_rank, text), values, specs)
    for variable, value in zip(found, theirs, strict=True):
        variable.assign(value)


def op_of(op: ReduceOp | None, average: bool | None = None) -> ReduceOp:
    """The operation that `op` or `average` names. Raises ConfigError for both at once and for Adasum."""
    if op is not None and average is not None:
        raise ConfigError(
            "allreduce got both `op` and `average`",
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
            for i in mine:  # copies: the buffer is reused, and a tensor may keep an array's memory
                results[i] = flat[place : place + arrays[i].size].astype(dtype).reshape(arrays[i].shape)
                place += arrays[i].size
        return results  # type: ignore[return-value]  # every place is filled above

    reduced: list[Array] = call(text, 0, reduce)
    return reduced


def _buffer(communicator: Communicator, size: int, dtype: np.dtype[Any]) -> Array:
    """A buffer that is kept, since training reduces the same number of elements at every step."""
    buffers = runtime().buffers
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
    """The rows of all ranks, one after another; an optimizer adds rows with the same index."""
    if how not in (Average, Sum):
        absent(f"allreduce of tf.IndexedSlices by {how.name}", instead="Use op=hvd.Average or op=hvd.Sum.")
    factor = before * after / (runtime().world.num_ranks if how is Average else 1)
    values = allgather(slices.values, f"{name or 'slices'}, values")
    indices = allgather(slices.indices, f"{name or 'slices'}, indices")
    return tf.IndexedSlices(values * tf.cast(factor, values.dtype), indices, slices.dense_shape)


def _broadcast_arrays(root: int, name: str, *arrays: Array) -> list[Array]:
    """Rank `root`'s arrays on all ranks, sent as bytes."""
    if not 0 <= root < runtime().world.num_ranks:
        raise ConfigError(
            "broadcast got a root rank that does not exist",
            got=f"root_rank={root}",
            allowed=f"0 to {runtime().world.num_ranks - 1}",
            next_step="Correct root_rank.",
        )
    shapes = "; ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)

    def send(communicator: Communicator, _: list[int]) -> list[Array]:
        flat = np.concatenate([_bytes_of(array) for array in arrays])
        communicator.broadcast(flat, root)
        results, start = [], 0
        for array in arrays:
            results.append(flat[start : start + array.nbytes].copy().view(array.dtype).reshape(array.shape))
            start += array.nbytes
        return results

    found: list[Array] = call(f"broadcast {name} of {shapes} from rank {root}", 0, send)
    return found


def _gather(name: str, array: Array) -> list[Array]:
    rest = array.shape[1:]
    text = f"allgather {name} of {array.dtype}{['rows', *rest]}"

    def gather(communicator: Communicator, rows: list[int]) -> list[Array]:
        joined = np.concatenate(communicator.all_gather_ragged(_bytes_of(array)))
        whole = joined.view(array.dtype) if math.prod(rest) and sum(rows) else np.empty(0, array.dtype)
        start = np.int64(sum(rows[: communicator.rank]))
        return [whole.reshape(sum(rows), *rest), np.asarray(start)]

    found: list[Array] = call(text, len(array), gather)
    return found


def _exchange(name: str, equal: bool, array: Array, splits: NDArray[np.int64]) -> list[Array]:
    rest, ranks = array.shape[1:], runtime().world.num_ranks
    if equal:
        splits = np.full(ranks, len(array) // ranks)
    if splits.shape != (ranks,) or (splits < 0).any() or splits.sum() != len(array):
        raise ConfigError(
            "alltoall got splits that do not fit its tensor",
            got=f"{len(array)} rows, " + (f"in {ranks} equal parts" if equal else f"splits {splits.tolist()}"),
            allowed=f"one number from 0 up for each of {ranks} ranks, which add up to the rows",
            next_step="Correct splits.",
        )
    parts = [_bytes_of(part) for part in np.split(array, np.cumsum(splits)[:-1])]
    row_bytes = math.prod(rest) * array.itemsize

    def exchange(communicator: Communicator, _: list[int]) -> list[Array]:
        found = communicator.all_to_all_ragged(parts)
        sources = np.array([part.size // max(1, row_bytes) for part in found], np.int64)
        rows = np.concatenate(found).view(array.dtype).reshape(int(sources.sum()), *rest)
        return [rows, sources]

    found: list[Array] = call(f"alltoall {name} of {array.dtype}{['rows', *rest]}", len(array), exchange)
    return found


def _bytes_of(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check_numbers(what: str, value: tf.Tensor) -> None:
    if value.dtype in (tf.string, tf.resource, tf.variant):
        raise ConfigError(
            f"{what} got a tensor without numbers",
            got=value.dtype.name,
            allowed="numbers and booleans",
            next_step="For strings use hvd.broadcast_object or hvd.allgather_object.",
        )
