"""The exchange itself: NumPy arrays of all ranks reduced, joined, exchanged or replaced, for TensorFlow and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.horovod.runtime import absent, call, runtime
from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import DTYPES, FLOATS, Communicator, Op

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


def check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype not in DTYPES and dtype not in _WIDER:
        raise ConfigError(
            "allreduce got a dtype that it cannot sum",
            got=str(dtype),
            allowed=", ".join(str(known) for known in (*DTYPES, *_WIDER)),
            next_step="Cast the tensor first.",
        )


def reduce_arrays(arrays: Sequence[Array], how: ReduceOp, before: float, after: float, name: str | None) -> list[Array]:
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


def broadcast_arrays(root: int, name: str, *arrays: Array) -> list[Array]:
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


def gather_arrays(name: str, array: Array) -> list[Array]:
    rest = array.shape[1:]
    text = f"allgather {name} of {array.dtype}{['rows', *rest]}"

    def gather(communicator: Communicator, rows: list[int]) -> list[Array]:
        joined = np.concatenate(communicator.all_gather_ragged(_bytes_of(array)))
        whole = joined.view(array.dtype) if math.prod(rest) and sum(rows) else np.empty(0, array.dtype)
        start = np.int64(sum(rows[: communicator.rank]))
        return [whole.reshape(sum(rows), *rest), np.asarray(start)]

    found: list[Array] = call(text, len(array), gather)
    return found


def exchange_rows(name: str, equal: bool, array: Array, splits: NDArray[np.int64]) -> list[Array]:
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
