"""PyTorch's tensors reduced, joined, exchanged or replaced by one rank's, at once or by a handle.

A thread makes the calls, in the order in which the script makes them, so that ranks stay in step whatever is waited for
when. Tensors of a device travel through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.horovod import objects
from lockstep.horovod.arrays import (
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
from lockstep.horovod.runtime import absent, check, own_runtime, runtime
from lockstep.storage.errors import ConfigError

Array = NDArray[Any]
Handle = Future[Any]


class Compressor:
    """Makes a tensor smaller before it is reduced, and restores its dtype afterwards."""

    wire: torch.dtype | None = None
    """The dtype that floats of 32 and 64 bits travel in; None: their own."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor to reduce, and the context for `decompress`."""
        if cls.wire is None or tensor.dtype not in (torch.float32, torch.float64):
            return tensor, None
        return tensor.to(cls.wire), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced tensor in its own dtype again."""
        return tensor if ctx is None else tensor.to(ctx)


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""


class FP16Compressor(Compressor):
    """Floats of 32 and 64 bits as float16: sums are rounded to 11 bits, and above 65,504 they are infinite."""

    wire = torch.float16


class Compression:
    """The known compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor


def in_turn(function: Callable[..., Any], *args: Any) -> Handle:
    """Have `function(*args)` called by the thread of calls, after all calls before it."""
    here = own_runtime()
    here.last_call = here.queue.submit(function, *args)
    return here.last_call


def after_all(function: Callable[[], Any]) -> Any:
    """The result of `function()`, called after all calls before it: by this thread if they are done, which saves two
    changes of threads, a third of the cost of the check in each step.
    """
    before = own_runtime().last_call
    return function() if before is None or before.done() else in_turn(function).result()


def array_of(tensor: Any) -> Array:
    """The numbers of a tensor, of its shape; shares memory with a contiguous one of the host."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
        raise ConfigError(
            "a call to other ranks needs a dense PyTorch tensor",
            got="a sparse tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__,
            allowed="torch.Tensor of numbers or booleans",
            next_step="Use torch.as_tensor(value), tensor.to_dense(), or hvd.broadcast_object for other values.",
        )
    plain = tensor.detach().to("cpu").contiguous()
    if plain.dtype == torch.bfloat16:
        return np.asarray(plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(plain.numpy())


def tensor_of(array: Array, device: Any = "cpu") -> Any:
    """A tensor of a writable array's numbers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


class _Differentiable(torch.autograd.Function):
    """Computes `forward(tensor)`, and `backward(gradient)` as its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, run: Callable[[Any], Any], back: Callable[[Any], Any]) -> Any:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.back(gradient), None, None


def synchronize(handle: Handle) -> Any:
    """Wait for a call that was started with `_async`, and return its result; raises what the call raised."""
    return handle.result()


def poll(handle: Handle) -> bool:
    """Whether a call that was started with `_async` is done, so that `synchronize` returns at once."""
    return handle.done()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an `allreduce` without a gradient, and return its handle. The tensor must not change until the call is
    done.
    """
    check("allreduce_async", process_set=process_set)
    return in_turn(_reduce, [tensor], op_of(op, average), prescale_factor, postscale_factor, name, False)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an `allreduce_` and return its handle."""
    check("allreduce_async_", process_set=process_set)
    return in_turn(_reduce, [tensor], op_of(op, average), prescale_factor, postscale_factor, name, True)


def allreduce_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `allreduce` in place, without a gradient, with the arguments of `allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Any:
    """Reduce a tensor over all ranks; returns a new one of its shape, dtype and device.

    The mean unless `op` or `average` is given; a mean of integers is truncated. Values are multiplied by the factors
    before and after. Differentiable, except for Min and Max. Raises TrainingFailedError if the ranks' calls differ.
    """
    check("allreduce", process_set=process_set)
    how = op_of(op, average)

    def run(value: Any) -> Any:
        small, ctx = compression.compress(value)
        (result,) = synchronize(in_turn(_reduce_all, [small], how, prescale_factor, postscale_factor, name))
        return compression.decompress(result, ctx)

    def back(gradient: Any) -> Any:
        if how not in (Average, Sum):
            absent(f"gradient of allreduce(op={how.name})")
        label = f"gradient of {name or 'allreduce'}"
        return allreduce(gradient, None, label, compression, how, prescale_factor, postscale_factor)

    return _Differentiable.apply(tensor, run, back)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Any]:
    """Call `allreduce` on several tensors at once, with one message per dtype; without a gradient."""
    check("grouped_allreduce", process_set=process_set)
    packed = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in packed]
    if not small:
        return []
    results = synchronize(in_turn(_reduce_all, small, op_of(op, average), prescale_factor, postscale_factor, name))
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, packed, strict=True)]


def allgather_async(tensor: Any, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather` without a gradient, and return its handle."""
    check("allgather_async", process_set=process_set)
    return in_turn(lambda: _gather(tensor, name)[0])


def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The tensors of all ranks, joined along their first dimension, which may differ; a scalar counts as one row.

    Differentiable. Raises TrainingFailedError if the ranks' calls, dtypes or other dimensions differ.
    """
    check("allgather", process_set=process_set)
    place: list[int] = []

    def run(value: Any) -> Any:
        joined, start = synchronize(in_turn(_gather, value, name))
        place.append(start)
        return joined

    def back(gradient: Any) -> Any:
        total = allreduce(gradient, op=Sum, name=f"gradient of {name or 'allgather'}")
        rows = 1 if tensor.dim() == 0 else len(tensor)
        return total[place[0] : place[0] + rows].reshape(tensor.shape)

    return _Differentiable.apply(tensor, run, back)


def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r, in order; returns the rows that the ranks have sent here.

    `splits` (num_ranks,) integers add up to the rows; None: equal parts. With `splits` the result is (rows, rows from
    each rank (num_ranks,) int32), as in Horovod. Differentiable. Raises ConfigError for splits that do not fit,
    TrainingFailedError if the ranks' calls, dtypes or other dimensions differ.
    """
    check("alltoall", process_set=process_set)
    counts = np.zeros(0, np.int64) if splits is None else np.asarray(splits, np.int64)
    sources: list[Array] = []

    def exchange(value: Any, parts: Array, label: str) -> tuple[Any, Array]:
        equal = splits is None and not sources
        rows, found = synchronize(in_turn(exchange_rows, label, equal, array_of(value), parts))
        return tensor_of(rows, value.device), found

    def run(value: Any) -> Any:
        rows, found = exchange(value, counts, name or "")
        sources.append(found)
        return rows

    def back(gradient: Any) -> Any:
        return exchange(gradient, sources[0], f"gradient of {name or 'alltoall'}")[0]

    rows = _Differentiable.apply(tensor, run, back)
    return rows if splits is None else (rows, torch.from_numpy(sources[0].astype(np.int32)))


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast` without a gradient, and return its handle."""
    check("broadcast_async", process_set=process_set)
    return in_turn(_broadcast, tensor, root_rank, name, False)


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast_` and return its handle."""
    check("broadcast_async_", process_set=process_set)
    return in_turn(_broadcast, tensor, root_rank, name, True)


def broadcast_(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Call `broadcast` in place, without a gradient."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Rank `root_rank`'s tensor on all ranks, as a new one; shapes and dtypes must be equal. Differentiable."""
    check("broadcast", process_set=process_set)

    def run(value: Any) -> Any:
        return synchronize(in_turn(_broadcast, value, root_rank, name, False))

    def back(gradient: Any) -> Any:
        total = allreduce(gradient, op=Sum, name=f"gradient of {name or 'broadcast'}")
        return total if runtime().world.rank == root_rank else torch.zeros_like(total)

    return _Differentiable.apply(tensor, run, back)


def barrier(process_set: Any = None) -> None:
    """Return once every rank has called it."""
    synchronize(in_turn(objects.barrier, process_set))


def _reduce_all(tensors: Sequence[Any], how: ReduceOp, before: float, after: float, name: str | None) -> list[Any]:
    arrays = [array_of(tensor) for tensor in tensors]
    for array in arrays:
        check_dtype(array.dtype)
    reduced = reduce_arrays(arrays, how, before, after, name)
    return [tensor_of(array, tensor.device) for array, tensor in zip(reduced, tensors, strict=True)]


def _reduce(
    tensors: Sequence[Any], how: ReduceOp, before: float, after: float, name: str | None, in_place: bool
) -> Any:
    (result,) = _reduce_all(tensors, how, before, after, name)
    return _put(tensors[0], result) if in_place else result


def _gather(tensor: Any, name: str | None) -> tuple[Any, int]:
    joined, start = gather_arrays(name or "", np.atleast_1d(array_of(tensor)))
    return tensor_of(joined, tensor.device), int(start)


def _broadcast(tensor: Any, root_rank: int, name: str | None, in_place: bool) -> Any:
    (array,) = broadcast_arrays(root_rank, name or "", array_of(tensor))
    result = tensor_of(array, tensor.device)
    return _put(tensor, result) if in_place else result


def _put(tensor: Any, result: Any) -> Any:
    with torch.no_grad():
        return tensor.copy_(result)
