"""What ranks begin with: parameters, an optimizer's state and Python values, sent from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lockstep.horovod import objects
from lockstep.horovod.arrays import broadcast_arrays
from lockstep.horovod.runtime import check, runtime
from lockstep.horovod.torch.collectives import array_of, in_turn, tensor_of
from lockstep.storage.errors import ConfigError

_TENSOR = "torch.Tensor"


def broadcast_parameters(params: Any, root_rank: int, process_set: Any = None) -> None:
    """Replace tensors by those of rank `root_rank` on all ranks, in place and in one message.

    `params` is a `state_dict()` or `named_parameters()`; names, shapes and dtypes must be equal on all ranks.
    """
    check("broadcast_parameters", process_set=process_set)
    pairs: Iterable[tuple[str, Any]] = params.items() if isinstance(params, Mapping) else params
    named = dict(pairs)
    wrong = next((name for name, value in named.items() if not isinstance(value, torch.Tensor)), None)
    if wrong is not None:
        raise ConfigError(
            "hvd.broadcast_parameters got a value that is no tensor",
            got=f"{wrong}: {type(named[wrong]).__name__}",
            allowed="model.state_dict() or model.named_parameters()",
            next_step="Send other values by hvd.broadcast_object, an optimizer by hvd.broadcast_optimizer_state.",
        )
    if named:
        tensors = list(named.values())
        received = in_turn(_send, root_rank, f"parameters {', '.join(named)}", tensors).result()
        with torch.no_grad():
            for tensor, value in zip(tensors, received, strict=True):
                tensor.copy_(value)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, process_set: Any = None) -> None:
    """Give all ranks' optimizers the state and the settings (learning rate, ...) of rank `root_rank`'s.

    The optimizers of other ranks may have no state yet, as after a resume on rank 0 only.
    """
    check("broadcast_optimizer_state", process_set=process_set)
    state = broadcast_object(optimizer.state_dict(), root_rank, "optimizer state")
    if runtime().world.rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Rank `root_rank`'s value on all ranks; the others' own values are unused.

    None, booleans, numbers, strings, bytes, NumPy arrays, tensors, and lists, tuples and dicts of these; tensors come
    back as tensors of the host. Raises ConfigError for anything else: loading a pickle runs code from the network.
    """
    check("broadcast_object", process_set=process_set)
    tensors: list[Any] = []
    here = runtime().world.rank == root_rank
    plain = _without_tensors(obj, tensors) if here else None
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    plain, shapes = in_turn(objects.broadcast_object, [plain, shapes], root_rank, None, name).result()
    if not here:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
    received = in_turn(_send, root_rank, name or "object", tensors).result() if tensors else []
    return obj if here else _with_tensors(plain, received)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Every rank's value, in rank order, of the types of `broadcast_object`; tensors come back as NumPy arrays."""
    return list(in_turn(objects.allgather_object, obj, None, name, process_set).result())


def _send(root_rank: int, name: str, tensors: list[Any]) -> list[Any]:
    # A scalar's shape is in the text that ranks compare, so it keeps it.
    return [tensor_of(array) for array in broadcast_arrays(root_rank, name, *map(array_of, tensors))]


def _without_tensors(value: Any, tensors: list[Any]) -> Any:
    """Return `value` with each tensor replaced by its number in `tensors`, which gets them."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[int(value[_TENSOR])]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
