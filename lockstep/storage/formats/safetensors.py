"""The header of a safetensors file: which tensors it holds, where and of what type. Read strictly, without the data.

header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces | data
"""

from __future__ import annotations

import json
import math
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.storage import strict
from lockstep.storage.errors import CorruptionError, DataError

# By NumPy's names. safetensors has more, for which NumPy has no type of its own.
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
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def head_bytes(length: bytes, size: int, where: str) -> int:
    """Bytes before the data, by a file's first 8 and its size. Raises CorruptionError naming `where`."""
    head = LENGTH_BYTES + int.from_bytes(length, "little")
    if not LENGTH_BYTES < head <= min(size, MAX_HEADER_BYTES):
        raise _no_safetensors(where, f"a header of {head - LENGTH_BYTES} bytes in {size}")
    return head


def parse_header(text: bytes, size: int, where: str) -> dict[str, Stored]:
    """The tensors by the header's JSON, of a file of `size` bytes, in the order of their places.

    Raises CorruptionError naming `where` for anything else: gaps, overlaps, bytes behind the end, other types.
    """
    try:
        header = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        header = strict.mapping(header, where="the header")
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
    """`parse_header` of an open file of `size` bytes, of which no more than the header is read."""
    head = head_bytes(file.read(LENGTH_BYTES), size, where)
    return parse_header(file.read(head - LENGTH_BYTES), size, where)


def _stored(name: str, entry: Any, head: int) -> Stored:
    info = strict.obj(entry, ("dtype", "shape", "data_offsets"), where=name)
    shape = [strict.count(item, where=name) for item in strict.items(info["shape"], where=name)]
    offsets = [strict.count(item, where=name) for item in strict.items(info["data_offsets"], where=name)]
    dtype = np.dtype(_NAMES[strict.string(info["dtype"], where=name, choices=_NAMES)])
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
