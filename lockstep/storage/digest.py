"""Length, SHA-256 and CRC-32C of bytes, as manifests list them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, Protocol

import google_crc32c

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 22


class Readable(Protocol):
    """An open file, or anything with its `read`."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class Digest:
    """Adds up all bytes so far: `bytes` (their number), `sha256` and `crc32c`."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32c = 0
        self.bytes = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self._sha256.update(data)
        self._crc32c = google_crc32c.extend(self._crc32c, data)
        self.bytes += len(data)

    @property
    def sha256(self) -> str:
        """SHA-256 in hex."""
        return self._sha256.hexdigest()

    @property
    def crc32c(self) -> str:
        """CRC-32C, 8 hex digits."""
        return f"{self._crc32c:08x}"


def digest_of(file: Readable) -> Digest:
    """The digest of a file from its current position to its end. Memory: CHUNK_BYTES."""
    digest = Digest()
    while data := file.read(CHUNK_BYTES):
        digest.add(data)
    return digest


class HashedReader(io.RawIOBase):
    """Reads a file in order and keeps the `digest` of the bytes read; wrap it in io.BufferedReader."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        super().__init__()
        self._file, self._on_bytes = file, on_bytes
        self.digest = Digest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._count(data)
        return len(data)

    def drain(self) -> None:
        """Read the rest of the file."""
        while data := self._file.read(CHUNK_BYTES):
            self._count(data)

    def _count(self, data: bytes) -> None:
        self.digest.add(data)
        self._on_bytes(len(data))
