"""Saves and loads the state of callbacks, such as EarlyStopping and ReduceLROnPlateau, as JSON and tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.storage.documents import canonical_bytes
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.run.checkpoint import Tensors

KIND = "callbacks"
MAX_STATE_BYTES = 256 << 10  # it is sent to the driver in one frame
# Keras sets them at every start. The constructor sets min_delta, and the first epoch gives it the sign of the mode: a
# restored one would change its sign at each restart.
SKIPPED = {"model", "_model", "params", "min_delta"}
log = logging.getLogger(__name__)


class _Unsaved(Exception):
    """A value that is neither JSON nor array."""


def save(callbacks: Sequence[Any]) -> tuple[list[dict[str, Any]], Tensors]:
    """One JSON object a callback, {class, state}, and the arrays that these refer to by name.

    Attributes that are neither JSON, NumPy numbers nor arrays (functions, files, the model) are left out and logged: a
    callback sets these itself when it is constructed or in on_train_begin. Raises ConfigError for more than 256 KiB of
    JSON.
    """
    documents: list[dict[str, Any]] = []
    tensors: Tensors = {}
    for number, callback in enumerate(callbacks):
        state: dict[str, Any] = {}
        for name, value in sorted(vars(callback).items()):
            if name in SKIPPED:
                continue
            found: Tensors = {}
            try:
                state[name] = _pack(value, f"{KIND}/{number:04d}/{name}", found)
            except _Unsaved:
                log.debug("%s.%s is not saved: %s", type(callback).__name__, name, type(value).__name__)
                continue
            tensors |= found
        _check_size(type(callback).__name__, state)
        documents.append({"class": type(callback).__name__, "state": state})
    return documents, tensors


def load(callbacks: Sequence[Any], documents: Sequence[dict[str, Any]], tensors: Tensors, where: str) -> None:
    """Set the attributes that `save` returned. Raises DataError if the callbacks are not those that were saved."""
    saved, given = [doc.get("class") for doc in documents], [type(callback).__name__ for callback in callbacks]
    if saved != given:
        raise DataError(
            f"the checkpoint {where} belongs to other callbacks",
            got=", ".join(map(str, saved)) or "none",
            allowed=", ".join(given) or "none",
            next_step="Resume with the callbacks that the run began with.",
        )
    for callback, document in zip(callbacks, documents, strict=True):
        for name, value in document["state"].items():
            setattr(callback, name, _unpack(value, tensors))


def _check_size(callback: str, state: dict[str, Any]) -> None:
    sizes = {name: len(canonical_bytes(value)) for name, value in state.items()}
    if sum(sizes.values()) > MAX_STATE_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"the callback {callback} has too much state for a checkpoint's manifest",
            got=f"{sum(sizes.values())} bytes of JSON, most of it in `{largest}`",
            allowed=f"{MAX_STATE_BYTES} bytes a callback, besides NumPy arrays of any size",
            next_step=f"Keep `{largest}` as a NumPy array, or have the callback write it to a file.",
        )


def _pack(value: Any, name: str, tensors: Tensors) -> Any:
    """JSON for a value; a type that JSON lacks becomes an object with one key that begins with $."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, np.generic):
        return {"$number": [value.dtype.name, _pack(value.item(), name, tensors)]}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise _Unsaved
        tensors[name] = value
        return {"$array": name}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str | int) and not isinstance(key, bool) for key in value):
        pairs = enumerate(value.items())
        return {"$dict": [[key, _pack(item, f"{name}/{i}", tensors)] for i, (key, item) in pairs]}
    raise _Unsaved


def _unpack(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$float":
        return float(content)
    if kind == "$number":
        return np.dtype(content[0]).type(_unpack(content[1], tensors))
    if kind == "$array":
        return tensors[content].copy()
    if kind == "$tuple":
        return tuple(_unpack(item, tensors) for item in content)
    return {key: _unpack(item, tensors) for key, item in content}
