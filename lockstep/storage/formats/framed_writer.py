"""Writing records that a kernel has framed: a batch at a time, with the offset index and all digests as they come."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.formats.tfrecord import record_offsets


class _Sink(Protocol):
    def write(self, data: memoryview, /) -> int: ...


class FramedWriter:
    """Writes records that are framed already, many at once, and the offset index beside them as they come.

    Both checksums of each are checked once more: what was encoded is what is written, whatever lay between. Memory
    grows with the blocks alone.

    Attributes: `records` and `bytes` written so far, `index_bytes` of the index, `block_offsets` (list of int).
    """

    def __init__(self, sink: _Sink, index: _Sink, block_records: int) -> None:
        self._sink, self._index, self._block_records = sink, index, block_records
        self._sha256, self._index_sha256 = hashlib.sha256(), hashlib.sha256()
        self._crc32c = 0
        self.records = self.bytes = self.index_bytes = 0
        self.block_offsets: list[int] = []

    def write(self, data: NDArray[np.uint8]) -> None:
        """Append whole framed records, end to end. Raises CorruptionError for anything else."""
        from lockstep.storage.kernels import frames

        offsets = record_offsets(data, file="the records of a task", first_record=self.records, base_offset=self.bytes)
        address = data.ctypes.data
        lines = np.empty(frames.LINE_MAX_BYTES * (len(offsets) - 1), dtype=np.uint8)
        size = frames.index_lines(offsets, self.bytes, lines.ctypes.data) - lines.ctypes.data
        self._sink.write(data.data)
        self._sha256.update(data.data)
        self._crc32c = frames.crc32c_of(np.uint64(self._crc32c), address, len(data))
        self._index.write(lines[:size].data)
        self._index_sha256.update(lines[:size].data)
        first_block = -self.records % self._block_records
        self.block_offsets += (offsets[:-1][first_block :: self._block_records] + self.bytes).tolist()
        self.records += len(offsets) - 1
        self.bytes += len(data)
        self.index_bytes += size

    @property
    def sha256(self) -> str:
        """SHA-256 of all records written, in hex."""
        return self._sha256.hexdigest()

    @property
    def crc32c(self) -> str:
        """CRC-32C of all records written, 8 hex digits."""
        return f"{int(self._crc32c):08x}"

    @property
    def index_sha256(self) -> str:
        """SHA-256 of the index, in hex."""
        return self._index_sha256.hexdigest()
