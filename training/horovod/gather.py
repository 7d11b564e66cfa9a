"""Tensors of all ranks one after another, and one rank's for all: `hvd.allgather`, `hvd.broadcast` and relatives."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError
from training.comm.base import Communicator
from training.horovod.place import call, check, here, run

Array = NDArray[Any]


def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None) -> Any:
    """The tensors of all ranks joined along their first dimension, which may differ; a scalar is one row.

    Can be differentiated. Raises TrainingFailedError where the ranks' calls, dtypes or other dimensions differ.
    """
    check("allgather", process_set=process_set)
    value = tf.convert_to_tensor(tensor)
    _check_dtype("allgather", value)
    if value.shape.rank == 0:
        value = tf.reshape(value, (1,))

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        shape = tf.TensorShape([None, *rows.shape[1:]]) if rows.shape.rank is not None else None
        specs = [tf.TensorSpec(shape, rows.dtype), tf.TensorSpec((), tf.int64)]
        joined, start = run(lambda array: _gather(array, name), [rows], specs)

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            from training.horovod.reduce import Sum, allreduce  # reduces sparse gradients by allgather itself

            total = allreduce(upstream, op=Sum, name=f"gradient of {name or 'allgather'}")
            return total[start : start + tf.shape(rows, tf.int64)[0]]

        return joined, backward

    return gather(value)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> tf.Tensor:
    """Rank `root_rank`'s tensor on all ranks; shapes and dtypes are equal everywhere. Can be differentiated."""
    check("broadcast", process_set=process_set)
    value = tf.convert_to_tensor(tensor)
    _check_dtype("broadcast", value)

    @tf.custom_gradient
    def send(mine: tf.Tensor) -> Any:
        spec = tf.TensorSpec(mine.shape, mine.dtype)
        (theirs,) = run(lambda array: broadcast_arrays([array], root_rank, name or ""), [mine], [spec])

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            from training.horovod.reduce import Sum, allreduce  # as above

            total = allreduce(upstream, op=Sum, name=f"gradient of {name or 'broadcast'}")
            return total if here().world.rank == root_rank else tf.zeros_like(total)

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
    # Without the model's name: a Sequential that was loaded has it not, where a new one has.
    paths = [str(getattr(variable, "path", variable.name)).split("/") for variable in found[:3]]
    names = ", ".join("/".join(path[-2:]) for path in paths)
    text = f"variables ({len(found)}: {names}...)"
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
    for variable, value in zip(
        found, run(lambda *arrays: broadcast_arrays(arrays, root_rank, text), values, specs), strict=True
    ):
        variable.assign(value)


def broadcast_arrays(arrays: Sequence[Array], root: int, name: str) -> list[Array]:
    """Rank `root`'s arrays on all ranks: as bytes, one after another."""
    if not 0 <= root < here().world.num_ranks:
        raise ConfigError(
            "broadcast got a root rank that is not there",
            got=f"root_rank={root}",
            allowed=f"0 to {here().world.num_ranks - 1}",
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


def _gather(array: Array, name: str | None) -> list[Array]:
    rest = array.shape[1:]
    text = f"allgather {name or ''} of {array.dtype}{['rows', *rest]}"

    def gather(communicator: Communicator, rows: list[int]) -> list[Array]:
        joined = np.concatenate(communicator.all_gather_ragged(_bytes_of(array)))
        whole = joined.view(array.dtype) if math.prod(rest) and sum(rows) else np.empty(0, array.dtype)
        start = np.int64(sum(rows[: communicator.rank]))
        return [whole.reshape(sum(rows), *rest), np.asarray(start)]

    found: list[Array] = call(text, len(array), gather)
    return found


def _bytes_of(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check_dtype(what: str, value: tf.Tensor) -> None:
    if value.dtype in (tf.string, tf.resource, tf.variant):
        raise ConfigError(
            f"{what} got a tensor that is no numbers",
            got=value.dtype.name,
            allowed="numbers and booleans",
            next_step="For strings use hvd.broadcast_object or hvd.allgather_object.",
        )


_TUPLE, _BYTES, _ARRAY, _PAIRS = "tuple", "bytes", "array", "dict"


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Rank `root_rank`'s value on all ranks; the others' own is not looked at.

    None, booleans, numbers, strings, bytes, NumPy arrays and scalars, tensors, and lists, tuples and dicts of these.
    Raises ConfigError for anything else: Horovod pickles, which would run code that came over the network.
    """
    check("broadcast_object", session=session, process_set=process_set)
    mine = _encode(obj) if here().world.rank == root_rank else b""

    def send(communicator: Communicator, lengths: list[int]) -> bytes:
        flat = np.zeros(lengths[root_rank], np.uint8)
        if mine:
            flat[:] = np.frombuffer(mine, np.uint8)
        communicator.broadcast(flat, root_rank)
        return flat.tobytes()

    return _decode(call(f"broadcast_object {name or ''} from rank {root_rank}", len(mine), send))


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Every rank's value, in rank order; see `broadcast_object` for what it may be."""
    check("allgather_object", session=session, process_set=process_set)
    mine = _encode(obj)

    def gather(communicator: Communicator, _: list[int]) -> list[bytes]:
        return communicator.all_gather_bytes(mine)

    return [_decode(part) for part in call(f"allgather_object {name or ''}", 0, gather)]


def barrier(process_set: Any = None) -> None:
    """Return once every rank has called it."""
    check("barrier", process_set=process_set)
    call("barrier", 0, lambda communicator, _: communicator.barrier())


def _encode(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def _decode(data: bytes) -> Any:
    return _value(json.loads(data))


def _plain(value: Any) -> Any:
    """JSON for a value: a list or a base type as itself, all else as {kind: content}."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is tuple:
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {_PAIRS: [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    held = value.numpy() if hasattr(value, "numpy") else value
    array = np.asarray(held)
    # What NumPy could make an array of (a named tuple, a range) would come back as another thing than it was.
    if not isinstance(held, np.ndarray | np.generic) or array.dtype.kind not in "biufc":
        raise ConfigError(
            "a value cannot be sent to other ranks",
            got=f"{type(value).__module__}.{type(value).__name__}",
            allowed="None, booleans, numbers, strings, bytes, arrays, and lists, tuples and dicts of these",
            next_step="Send what it is made of: pickled objects are not accepted, since to read one is to run it.",
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: [array.dtype.str, list(array.shape), isinstance(value, np.generic), data]}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == _TUPLE:
        return tuple(_value(item) for item in content)
    if kind == _PAIRS:
        return {_value(key): _value(item) for key, item in content}
    if kind == _BYTES:
        return base64.b64decode(content)
    dtype, shape, scalar, data = content
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array
