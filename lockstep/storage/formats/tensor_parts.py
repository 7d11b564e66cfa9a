"""A checkpoint manifest's `tensors`: of which parts, in which ranks' files, each tensor is made up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.storage import strict
from lockstep.storage.errors import CorruptionError
from lockstep.storage.formats.safetensors import Stored


class Divided(NamedTuple):
    """A tensor and its parts [rank, start, stop]: elements of it laid flat in C order."""

    dtype: str
    shape: list[int]
    parts: list[list[int]]


def read_divided(name: str, entry: Any, where: str) -> Divided:
    """One entry of `tensors`. Raises DataError for another form, CorruptionError where parts are no whole."""
    place = f"{where}: {name}"
    info = strict.obj(entry, ("dtype", "shape", "parts"), where=place)
    dtype, shape = strict.string(info["dtype"], where=place), _counts(info["shape"], place)
    parts = [_counts(part, place) for part in strict.items(info["parts"], where=place)]
    check_whole(name, shape, parts, where)
    return Divided(dtype, shape, parts)


def check_whole(name: str, shape: Sequence[int], parts: Sequence[Sequence[int]], where: str) -> None:
    """Raise CorruptionError unless every element is in one of the parts, which are in order."""
    done = 0
    for part in parts:
        if len(part) != 3 or part[1] != done or part[2] < part[1]:
            break
        done = part[2]
    else:
        if parts and done == math.prod(shape):
            return
    raise CorruptionError(
        f"the parts of {name} do not make up the whole",
        file=where,
        got=", ".join(str(list(part)) for part in parts) or "no part",
        allowed=f"[rank, start, stop] of elements 0 to {math.prod(shape)}, each once",
    )


def part_name(name: str, start: int, stop: int, elements: int) -> str:
    """A part's name in a rank's file: the tensor's own where it is whole, else with its elements behind."""
    return name if (start, stop) == (0, elements) else f"{name}[{start}:{stop}]"


def check_part(name: str, tensor: Divided, part: Sequence[int], stored: Mapping[str, Stored], file: str) -> None:
    """Hold a part against the header of its rank's file. Raises CorruptionError naming file and tensor."""
    _, start, stop = part
    key = part_name(name, start, stop, math.prod(tensor.shape))
    found = stored.get(key)
    if found is None:
        raise CorruptionError("a tensor that the manifest lists is not in its file", file=file, got=f"no {key}")
    if (math.prod(found.shape), found.dtype.name) != (stop - start, tensor.dtype):
        raise CorruptionError(
            "a tensor is not what the manifest says",
            file=file,
            got=f"{key}: {found.dtype.name}, {math.prod(found.shape)} elements",
            allowed=f"{tensor.dtype}, {stop - start} elements",
        )
    if key == name and found.shape != tensor.shape:
        raise CorruptionError(
            "a tensor is not what the manifest says",
            file=file,
            got=f"{key}: shape {found.shape}",
            allowed=f"shape {tensor.shape}",
        )


def _counts(value: Any, place: str) -> list[int]:
    return [strict.count(item, where=place) for item in strict.items(value, where=place)]
