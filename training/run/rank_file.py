"""A rank's file of a checkpoint as it lies in memory: safetensors, laid out so that copying the tensors writes it.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces | data

Little-endian; offsets count from the first byte of the data, which lies without gaps. Tensors of wide elements come
first, so that each begins at a multiple of its own element's width. (The format: github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import ConfigError, CorruptionError
from lockstep.storage.files.interface import FileSystem, Writer
from lockstep.storage.files.uncached import whole_pages
from lockstep.storage.formats.safetensors import DTYPES, LENGTH_BYTES, head_bytes, parse_header
from lockstep.storage.publish import write_stream

ALIGN_BYTES = 64
CHUNK_BYTES = 1 << 20
# What is written and read back in one call: the piece that a remote writer sends; the interpreter's lock is asked for
# once a piece.
PIECE_BYTES = 1 << 22
_memcmp = ctypes.CDLL(None).memcmp  # compares twice as fast as NumPy does, which makes an array of the answers
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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
            self._memory = whole_pages(size)
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
    head = head_bytes(file[:LENGTH_BYTES].tobytes(), file.size, where)
    stored = parse_header(file[LENGTH_BYTES:head].tobytes(), file.size, where)
    return {
        name: file[tensor.begin : tensor.begin + tensor.bytes].view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in stored.items()
    }


def upload(fs: FileSystem, url: str, file: NDArray[np.uint8]) -> None:
    """Publish the file durably and compare what reads back, without a second copy in memory.

    Raises what lockstep.storage.publish.write_stream does, CorruptionError where other bytes come back.
    """

    def produce(writer: Writer) -> None:
        for start in range(0, file.size, PIECE_BYTES):
            writer.write_uncached(file[start : start + PIECE_BYTES].data)

    write_stream(fs, url, produce)
    done, same, piece = 0, True, whole_pages(PIECE_BYTES)
    with fs.open_uncached(url) as back:
        while same and (count := back.readinto(piece.data)):  # type: ignore[attr-defined] # all have it
            same = count <= file.size - done and not _memcmp(piece.ctypes.data, file[done:].ctypes.data, count)
            done += count if same else 0
    if not same or done != file.size:
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
