"""Python values of one rank or of all, as JSON: `hvd.broadcast_object`, `hvd.allgather_object`; and `hvd.barrier`."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from lockstep.horovod.runtime import call, check, runtime
from lockstep.storage.errors import ConfigError
from lockstep.training.comm.base import Communicator

_TUPLE, _BYTES, _ARRAY, _PAIRS = "tuple", "bytes", "array", "dict"


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Rank `root_rank`'s value on all ranks; the others' own values are unused.

    None, booleans, numbers, strings, bytes, NumPy arrays and scalars, tensors, and lists, tuples and dicts of these.
    Raises ConfigError for anything else. Horovod would pickle it, but loading a pickle runs code from the network.
    """
    check("broadcast_object", session=session, process_set=process_set)
    mine = encode_object(obj) if runtime().world.rank == root_rank else b""

    def send(communicator: Communicator, lengths: list[int]) -> bytes:
        flat = np.zeros(lengths[root_rank], np.uint8)
        if mine:
            flat[:] = np.frombuffer(mine, np.uint8)
        communicator.broadcast(flat, root_rank)
        return flat.tobytes()

    return decode_object(call(f"broadcast_object {name or ''} from rank {root_rank}", len(mine), send))


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Every rank's value, in rank order, of the types of `broadcast_object`."""
    check("allgather_object", session=session, process_set=process_set)
    mine = encode_object(obj)

    def gather(communicator: Communicator, _: list[int]) -> list[bytes]:
        return communicator.all_gather_bytes(mine)

    return [decode_object(part) for part in call(f"allgather_object {name or ''}", 0, gather)]


def barrier(process_set: Any = None) -> None:
    """Return once every rank has called it."""
    check("barrier", process_set=process_set)
    call("barrier", 0, _barrier)


def _barrier(communicator: Communicator, _: list[int]) -> None:
    communicator.barrier()


def encode_object(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def decode_object(data: bytes) -> Any:
    return _value(json.loads(data))


def _plain(value: Any) -> Any:
    """JSON for a value: lists and base types unchanged, all others as {kind: content}."""
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
    # A named tuple or a range would be converted to an array, and come back as one.
    if not isinstance(held, np.ndarray | np.generic) or array.dtype.kind not in "biufc":
        raise ConfigError(
            "a value cannot be sent to other ranks",
            got=f"{type(value).__module__}.{type(value).__name__}",
            allowed="None, booleans, numbers, strings, bytes, arrays, and lists, tuples and dicts of these",
            next_step="Send its parts: pickled objects are not accepted, since loading one runs its code.",
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
