"""The header of a safetensors file: name, position and type of its tensors. Read strictly, without the data.

The library of that name would copy every tensor out of the bytes: decision 077 (divided-checkpoints).

header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces | data
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.storage import documents
from lockstep.storage.errors import CorruptionError, DataError

# By NumPy's names. safetensors has more types, which NumPy lacks.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {stored: name for name, stored in DTYPES.items()}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


class Stored(NamedTuple):
    """A tensor in a file: where it begins, in bytes of the file, and what it is."""

    begin: int
    dtype: np.dtype[Any]
    shape: list[int]

    @property
    def bytes(self) -> int:
        """The tensor's size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def head_bytes(length: bytes, size: int, where: str) -> int:
    """Bytes before the data, by a file's first 8 and its size. Raises CorruptionError naming `where`."""
    head = LENGTH_BYTES + int.from_bytes(length, "little")
    if not LENGTH_BYTES < head <= min(size, MAX_HEADER_BYTES):
        raise _no_safetensors(where, f"a header of {head - LENGTH_BYTES} bytes in {size}")
    return head


def parse_header(text: bytes, size: int, where: str) -> dict[str, Stored]:
    """The tensors by the header's JSON, of a file of `size` bytes, in the order of their places.

    Raises CorruptionError naming `where` for anything else: gaps, overlaps, bytes after the end, other types.
    """
    try:
        header = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        header = documents.mapping(header, where="the header")
        header.pop("__metadata__", None)
        head = end = LENGTH_BYTES + len(text)
        found = {name: _stored(name, entry, head) for name, entry in header.items()}
        found = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].bytes)))
        for name, tensor in found.items():
            if tensor.begin != end or end + tensor.bytes > size:
                at = tensor.begin - head
                raise ValueError(f"{name} at {at} to {at + tensor.bytes}, where {end - head} was next")
            end += tensor.bytes
        if end != size:
            raise ValueError(f"{size - end} bytes that belong to no tensor")
    except (ValueError, RecursionError, DataError) as error:
        raise _no_safetensors(where, str(error).splitlines()[0]) from error
    return found


def read_header(file: BinaryIO, size: int, where: str) -> dict[str, Stored]:
    """Read the header of an open file of `size` bytes as `parse_header` does, and no more than the header."""
    head = head_bytes(file.read(LENGTH_BYTES), size, where)
    return parse_header(file.read(head - LENGTH_BYTES), size, where)


def _stored(name: str, entry: Any, head: int) -> Stored:
    info = documents.obj(entry, ("dtype", "shape", "data_offsets"), where=name)
    shape = [documents.count(item, where=name) for item in documents.items(info["shape"], where=name)]
    offsets = [documents.count(item, where=name) for item in documents.items(info["data_offsets"], where=name)]
    dtype = np.dtype(_NAMES[documents.string(info["dtype"], where=name, choices=_NAMES)])
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} at {offsets}, of {dtype} {shape}")
    return Stored(head + offsets[0], dtype, shape)


def _no_safetensors(where: str, got: str) -> CorruptionError:
    return CorruptionError("a file of a checkpoint is not safetensors", file=where, got=got)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} as a number")


class Divided(NamedTuple):
    """A tensor and its parts [rank, start, stop]: elements of it laid flat in C order."""

    dtype: str
    shape: list[int]
    parts: list[list[int]]


def read_divided(name: str, entry: Any, where: str) -> Divided:
    """One entry of `tensors`. Raises DataError for another form, CorruptionError where parts are no whole."""
    place = f"{where}: {name}"
    info = documents.obj(entry, ("dtype", "shape", "parts"), where=place)
    dtype, shape = documents.string(info["dtype"], where=place), _counts(info["shape"], place)
    parts = [_counts(part, place) for part in documents.items(info["parts"], where=place)]
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
    """A part's name in a rank's file: the tensor's name, with a range of elements unless it is the whole tensor."""
    return name if (start, stop) == (0, elements) else f"{name}[{start}:{stop}]"


def check_part(name: str, tensor: Divided, part: Sequence[int], stored: Mapping[str, Stored], file: str) -> None:
    """Compare a part with the header of its rank's file. Raises CorruptionError naming file and tensor."""
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
    return [documents.count(item, where=place) for item in documents.items(value, where=place)]
