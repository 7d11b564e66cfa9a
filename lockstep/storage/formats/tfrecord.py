"""TFRecord framing: written with both checksums, and read with both checked."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CorruptionError

# A record on disk:
#   offset 0          uint64 little-endian   n, the length of the data
#   offset 8          uint32 little-endian   masked CRC-32C of the 8 length bytes
#   offset 12         n bytes                the data
#   offset 12 + n     uint32 little-endian   masked CRC-32C of the data
# masked(crc) = rotate right by 15 bits, plus 0xa282ead8, modulo 2^32. A file is records end to end, nothing else.
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<QI")
HEADER_BYTES = 12
FOOTER_BYTES = 4
FRAMING_BYTES = HEADER_BYTES + FOOTER_BYTES
MAX_BLOCK_BYTES = 2 << 30  # ours have some MiB; a forged manifest for a sparse file may claim any size
_MASK_DELTA = 0xA282EAD8
_CHUNK_BYTES = 1 << 22


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C of `data`, masked as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """The bytes of one record on disk: len(record) + 16."""
    length = _LENGTH.pack(len(record))
    return b"".join((length, _CRC.pack(masked_crc32c(length)), record, _CRC.pack(masked_crc32c(record))))


def record_offsets(
    buffer: bytes | bytearray | memoryview | NDArray[np.uint8],
    *,
    file: str,
    first_record: int = 0,
    base_offset: int = 0,
    check_data: bool = True,
) -> NDArray[np.int64]:
    """Where each record of a buffer of whole records begins and the last one ends, (n + 1,) int64.

    Checks what parse_records does, at memory speed, and raises the same CorruptionError. Without `check_data` the
    caller checks the checksums of the data, which take most of the time.
    """
    from lockstep.storage.kernels import frames

    data = np.frombuffer(buffer, dtype=np.uint8)
    offsets = np.empty(len(data) // FRAMING_BYTES + 1, dtype=np.int64)
    count = frames.scan(data.ctypes.data, len(data), offsets, check_data)
    if count < 0:
        parse_records(data.data, file=file, first_record=first_record, base_offset=base_offset)
        raise AssertionError(f"{file}: two readers disagree on the records after offset {base_offset}")
    return offsets[: count + 1].copy()  # a copy, which releases the unused rest


def index_bytes(offsets: Iterable[int], total_bytes: int) -> bytes:
    """The offset index of a file of `total_bytes` whose records begin at `offsets`."""
    starts = list(offsets)
    ends = [*starts[1:], total_bytes]
    return "".join(f"{start} {end - start}\n" for start, end in zip(starts, ends, strict=False)).encode("ascii")


def parse_records(
    buffer: bytes | bytearray | memoryview, *, file: str, first_record: int = 0, base_offset: int = 0
) -> list[memoryview]:
    """Take a buffer of whole records apart, both checksums checked; the views point into `buffer`.

    `file`, `first_record` and `base_offset` (of the buffer in the file) are for the message of the CorruptionError that
    a cut or changed buffer raises.
    """
    view = memoryview(buffer).cast("B")
    found: list[memoryview] = []
    position, end = 0, len(view)
    while position < end:
        number, place = first_record + len(found), base_offset + position
        length = _checked_length(bytes(view[position : position + HEADER_BYTES]), file, number, place)
        start = position + HEADER_BYTES
        if length > end - start - FOOTER_BYTES:
            allowed = f"{length} data bytes and {FOOTER_BYTES} of checksum"
            raise _cut(file, number, base_offset + end, allowed, f"{end - start} bytes")
        data = view[start : start + length]
        _check_data(bytes(data), bytes(view[start + length : start + length + FOOTER_BYTES]), file, number, place)
        found.append(data)
        position = start + length + FOOTER_BYTES
    return found


def read_records(source: BinaryIO | bytes, *, file: str) -> Iterator[bytes]:
    """Yield the records of a file or buffer one by one, both checksums checked.

    Memory is bounded by the largest record that is really there: a damaged length is refused by its checksum, and
    a forged one ends with the bytes of the file. Raises CorruptionError naming `file`, record and offset. A file
    cut at a record's end reads as a clean, shorter file: compare counts with the manifest.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        yield from (bytes(view) for view in parse_records(source, file=file))
        return
    number = place = 0
    while header := _read_up_to(source, HEADER_BYTES):
        length = _checked_length(header, file, number, place)
        data = _read_up_to(source, length)
        footer = _read_up_to(source, FOOTER_BYTES) if len(data) == length else b""
        if len(footer) < FOOTER_BYTES:
            got = len(data) + len(footer)
            allowed = f"{length} data bytes and {FOOTER_BYTES} of checksum"
            raise _cut(file, number, place + HEADER_BYTES + got, allowed, f"{got} bytes")
        _check_data(data, footer, file, number, place)
        yield data
        number += 1
        place += length + FRAMING_BYTES


def _read_up_to(source: BinaryIO, length: int) -> bytes:
    # In pieces, so that a forged length of 2^60 costs no more memory than the file has bytes.
    if length <= _CHUNK_BYTES:
        data = source.read(length)
        if len(data) == length or not data:
            return data
        pieces = [data]
    else:
        pieces = []
    missing = length - sum(map(len, pieces))
    while missing and (piece := source.read(min(missing, _CHUNK_BYTES))):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _checked_length(header: bytes, file: str, record: int, offset: int) -> int:
    if len(header) < HEADER_BYTES:
        raise _cut(file, record, offset + len(header), f"{HEADER_BYTES} header bytes", f"{len(header)} bytes")
    length, crc = _HEAD.unpack(header)
    expected = masked_crc32c(header[:8])
    if crc != expected:
        raise CorruptionError(
            "a record's length does not match its checksum",
            file=file,
            record=record,
            offset=offset,
            got=f"length {length}, checksum {crc:08x}",
            allowed=f"checksum {expected:08x}",
        )
    return int(length)


def _check_data(data: bytes, footer: bytes, file: str, record: int, offset: int) -> None:
    crc = _CRC.unpack(footer)[0]
    expected = masked_crc32c(data)
    if crc != expected:
        raise CorruptionError(
            "a record's data does not match its checksum",
            file=file,
            record=record,
            offset=offset,
            got=f"checksum {crc:08x} over {len(data)} bytes",
            allowed=f"checksum {expected:08x}",
        )


def _cut(file: str, record: int, offset: int, allowed: str, got: str) -> CorruptionError:
    return CorruptionError(
        "a file ends within a record", file=file, record=record, offset=offset, got=got, allowed=allowed
    )


class _FileSink(Protocol):
    def write(self, data: memoryview, /) -> int: ...


class FramedWriter:
    """Writes framed records, many at a time, and their offset index.

    Checks both checksums of each record once more, so that what was encoded is what is written. Memory grows only with
    the number of blocks.

    Attributes: `records` and `bytes` written so far, `index_bytes` of the index, `block_offsets` (list of int).
    """

    def __init__(self, sink: _FileSink, index: _FileSink, block_records: int) -> None:
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
