"""A rank's file of a checkpoint as it lies in memory: safetensors, laid out so that copying the tensors writes it.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces | data

Little-endian; offsets count from the first byte of the data, which lies without gaps. Tensors of wide elements come
first, so that each begins at a multiple of its own element's width. (The format: github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage import strict
from storage.errors import ConfigError, CorruptionError, DataError
from storage.fs import FileSystem
from storage.interface import Writer
from storage.publish import write_stream

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
ALIGN_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
CHUNK_BYTES = 1 << 20


class HostBuffer:
    """Memory that one file after another is laid out in; it grows when it must and is never given back.

    The first touch of fresh memory costs twenty times what a later copy into it does, so `reserve` does it early.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def reserve(self, size: int) -> None:
        """Have `size` bytes ready, touched. What was in the buffer is lost."""
        if size > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # the old one goes before the new one comes
            self._memory = np.empty(size, np.uint8)
            np.copyto(self._memory, 0)

    def fill(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """The file (bytes,) of these tensors, a view that is good until the next call. Equal tensors, equal bytes.

        Raises ConfigError naming a tensor whose dtype the file cannot hold.
        """
        head, offsets, size = _lay_out(tensors)
        self.reserve(size)
        file = self._memory[:size]
        file[: len(head)] = np.frombuffer(head, np.uint8)
        for name, value in tensors.items():
            begin = len(head) + offsets[name]
            place = file[begin : begin + value.nbytes].view(value.dtype)
            np.copyto(place.reshape(value.shape), value)
        return file


def file_bytes(tensors: Mapping[str, NDArray[Any]]) -> int:
    """The size of the file of these tensors. Raises ConfigError as `HostBuffer.fill` does."""
    return _lay_out(tensors)[2]


def tensors_in(file: NDArray[np.uint8], where: str) -> dict[str, NDArray[Any]]:
    """The tensors of a file (bytes,) of this form, or that the safetensors library wrote: views of it, without a copy.

    Raises CorruptionError naming `where` for anything else: gaps, overlaps, bytes behind the end, other types.
    """
    try:
        head = 8 + int.from_bytes(file[:8].tobytes(), "little")
        if not 8 < head <= min(file.size, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {head - 8} bytes in {file.size}")
        header = json.loads(file[8:head].tobytes(), object_pairs_hook=_once, parse_constant=_no_number)
        header = strict.mapping(header, where="the header")
        header.pop("__metadata__", None)
        found, end = {}, 0
        places = {name: _place(name, entry) for name, entry in header.items()}
        for name, (begin, dtype, shape) in sorted(places.items(), key=lambda item: (item[1][0], _bytes(*item[1][1:]))):
            size = _bytes(dtype, shape)
            if begin != end or begin + size > file.size - head:
                raise ValueError(f"{name} at {begin} to {begin + size}, where {end} was next")
            found[name] = file[head + begin : head + begin + size].view(dtype).reshape(shape)
            end = begin + size
        if head + end != file.size:
            raise ValueError(f"{file.size - head - end} bytes that belong to no tensor")
    except (ValueError, RecursionError, DataError) as error:
        got = str(error).splitlines()[0]
        raise CorruptionError("a file of a checkpoint is not safetensors", file=where, got=got) from error
    return found


def upload(fs: FileSystem, url: str, file: NDArray[np.uint8]) -> None:
    """Publish the file durably and compare what reads back, without a second copy in memory.

    Raises what storage.publish.write_stream does, CorruptionError where other bytes come back.
    """

    def produce(writer: Writer) -> None:
        for start in range(0, file.size, CHUNK_BYTES):
            writer.write(file[start : start + CHUNK_BYTES].data)

    write_stream(fs, url, produce)
    done = 0
    with fs.open_read(url) as back:
        while chunk := back.read(CHUNK_BYTES):
            if not np.array_equal(np.frombuffer(chunk, np.uint8), file[done : done + len(chunk)]):
                break
            done += len(chunk)
    if done != file.size:
        raise CorruptionError(
            "a file reads back otherwise than it was written",
            file=url,
            offset=done,
            got=f"other bytes from {done} on",
            allowed=f"{file.size} bytes as written",
        )


def sha256_of(file: NDArray[np.uint8]) -> str:
    """SHA-256 in hex; other threads run meanwhile."""
    return hashlib.sha256(file.data).hexdigest()


def _place(name: str, entry: Any) -> tuple[int, np.dtype[Any], list[int]]:
    """Offset, dtype and shape of one entry of a header."""
    info = strict.obj(entry, ("dtype", "shape", "data_offsets"), where=name)
    shape = [strict.count(item, where=name) for item in strict.items(info["shape"], where=name)]
    offsets = [strict.count(item, where=name) for item in strict.items(info["data_offsets"], where=name)]
    dtype = np.dtype(_NAMES[strict.string(info["dtype"], where=name, choices=_NAMES)])
    if len(offsets) != 2 or offsets[1] - offsets[0] != _bytes(dtype, shape):
        raise ValueError(f"{name} at {offsets}, of {dtype} {shape}")
    return offsets[0], dtype, shape


def _bytes(dtype: np.dtype[Any], shape: list[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} as a number")


def _lay_out(tensors: Mapping[str, NDArray[Any]]) -> tuple[bytes, dict[str, int], int]:
    """The file's head (length and header), each tensor's offset in the data, and the size of the whole."""
    header: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        value = tensors[name]
        if value.dtype.name not in DTYPES or not value.dtype.isnative:
            raise ConfigError(
                f"a checkpoint cannot hold {name}",
                got=f"dtype {value.dtype}",
                allowed=", ".join(DTYPES),
                next_step="Keep this state in one of these dtypes.",
            )
        offsets[name], end = end, end + value.nbytes
        place = [offsets[name], end]
        header[name] = {"dtype": DTYPES[value.dtype.name], "shape": list(value.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = math.ceil((8 + len(text)) / ALIGN_BYTES) * ALIGN_BYTES - 8
    return padded.to_bytes(8, "little") + text.ljust(padded), offsets, 8 + padded + end
