"""TensorFlow's tensors reduced, joined or replaced by one rank's: `hvd.allreduce`, `hvd.allgather`, `hvd.broadcast`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.horovod.arrays import (
    Array,
    Average,
    ReduceOp,
    Sum,
    broadcast_arrays,
    check_dtype,
    exchange_rows,
    gather_arrays,
    op_of,
    reduce_arrays,
)
from lockstep.horovod.runtime import absent, check, runtime
from lockstep.storage.errors import ConfigError


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
    """Call `allreduce` on several dense tensors at once, with one message per dtype."""
    check("grouped_allreduce", device_dense=device_dense, device_sparse=device_sparse, process_set=process_set)
    how = op_of(op, average)
    dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in dense:
        check_dtype(np.dtype(tensor.dtype.as_numpy_dtype))
    if not dense:
        return []

    @tf.custom_gradient
    def reduce(*inputs: tf.Tensor) -> Any:
        packed = [compression.compress(tensor) for tensor in inputs]
        small = [tensor for tensor, _ in packed]

        def reduced(*arrays: Array) -> list[Array]:
            return reduce_arrays(arrays, how, prescale_factor, postscale_factor, name)

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
        joined, start = run(partial(gather_arrays, name or ""), [rows], specs)

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
        received, sources = run(partial(exchange_rows, name or "", splits is None), [rows, counts], specs)

        def backward(upstream: tf.Tensor, *_: Any) -> tf.Tensor:
            back = partial(exchange_rows, f"gradient of {name or 'alltoall'}", False)
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
        (theirs,) = run(partial(broadcast_arrays, root_rank, name or ""), [mine], [spec])

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
    theirs = run(partial(broadcast_arrays, root_rank, text), values, specs)
    for variable, value in zip(found, theirs, strict=True):
        variable.assign(value)


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


def _check_numbers(what: str, value: tf.Tensor) -> None:
    if value.dtype in (tf.string, tf.resource, tf.variant):
        raise ConfigError(
            f"{what} got a tensor without numbers",
            got=value.dtype.name,
            allowed="numbers and booleans",
            next_step="For strings use hvd.broadcast_object or hvd.allgather_object.",
        )


_turns: list[tf.Variable] = []


def run(
    function: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Call `function(*arrays)`, which returns arrays of `specs`: at once in eager mode, else when the graph runs."""
    if tf.executing_eagerly():
        results = function(*map(np.asarray, tensors))  # views: functions do not write to their arguments
        return [tf.convert_to_tensor(value, spec.dtype) for value, spec in zip(results, specs, strict=True)]

    def taken(turn: Any, *arrays: Any) -> list[Any]:
        return [turn + 1, *function(*arrays)]

    order = _turn()
    # Ranks wait here: this must not be on a device, whose kernels run in an order of their own.
    with tf.device("CPU:0"):
        turn, *results = tf.numpy_function(
            taken, [order.read_value(), *tensors], [tf.int64, *(spec.dtype for spec in specs)], name="horovod"
        )
        order.assign(turn)
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    return results


def _turn() -> tf.Variable:
    if not _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            _turns.append(tf.Variable(0, trainable=False, dtype=tf.int64, name="horovod_turn"))
    return _turns[0]
