"""Gzip files that can be read from the middle: each block of records is deflated independently.

A file is one gzip member (RFC 1952), so that any reader of gzip can read it. No block refers back to another one, and
each ends on a byte boundary, as after zlib's Z_FULL_FLUSH; so a reader that knows where blocks begin inflates only the
ones that it needs. Concatenated members would allow that too, but TensorFlow loses some of them: decision 068.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.digest import Digest
from lockstep.storage.errors import CorruptionError, DataError
from lockstep.storage.formats.tfrecord import MAX_BLOCK_BYTES, record_offsets

# A file:
#   HEADER               gzip, deflate, no name, no time, no system
#   block after block    deflate, not the last of its stream; ends in an empty stored block, whose last bytes are MARK
#   b"\x03\x00"          an empty block, the last of the stream
#   uint32 little-endian CRC-32 of all that it unpacks to
#   uint32 little-endian length of that, modulo 2^32
HEADER = bytes.fromhex("1f8b08000000000000ff")
MARK = b"\x00\x00\xff\xff"
_LAST = b"\x03\x00"
TRAILER_BYTES = 10
LEVEL = 6  # the default of gzip, Hadoop and TensorFlow
_RAW = -15  # zlib's number for deflate without a header, window of 32 KiB
_NOTHING = ("", "", "")

Buffer = bytes | bytearray | memoryview


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


def pack(data: Buffer) -> bytes:
    """The stretch of deflate for one block. Raises DataError for more than MAX_BLOCK_BYTES.

    The same data give the same bytes from one build of zlib: `zlib.ZLIB_RUNTIME_VERSION`.
    """
    if len(data) > MAX_BLOCK_BYTES:
        raise DataError(
            "a block of records is too long to be packed",
            got=f"{len(data)} bytes",
            allowed=f"{MAX_BLOCK_BYTES} bytes",
            next_step="Write without compression, or leave out the records that are far longer than the others.",
        )
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, _RAW)
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH)


def trailer(crc32: int, size: int) -> bytes:
    """The end of a file whose blocks unpack to `size` bytes with the CRC-32 `crc32`."""
    return _LAST + crc32.to_bytes(4, "little") + (size % (1 << 32)).to_bytes(4, "little")


def unpack(block: Buffer, size: int, *, file: str, record: int, offset: int) -> bytes:
    """The uncompressed bytes of one block, which must be `size`; inflates at most one byte more.

    Checks only the length: the records have their own checksums. Raises CorruptionError naming `file`,
    the number of the first record and the block's offset for bytes that are no block, or one of more or fewer bytes.
    """
    data, wrong = b"", ("a block is longer than any", f"{size} bytes unpacked", f"{MAX_BLOCK_BYTES} bytes")
    if size <= MAX_BLOCK_BYTES:
        data, wrong = _unpacked(block, size)
    if wrong != _NOTHING:
        what, got, allowed = wrong
        raise CorruptionError(what, file=file, record=record, offset=offset, got=got, allowed=allowed)
    return data


def unpack_blocks(
    data: bytes, starts: Sequence[int], unpacked: Sequence[int], *, file: str, first_record: int, block_records: int
) -> bytes:
    """The uncompressed bytes of neighbouring blocks. `data` are the bytes of `file` from starts[0] to starts[-1]; they
    inflate to the bytes unpacked[0] to unpacked[-1] of the uncompressed file. Raises as `unpack` does.
    """
    view = memoryview(data)
    places = zip(pairwise(starts), pairwise(unpacked), strict=True)
    found = [
        unpack(
            view[start - starts[0] : stop - starts[0]],
            end - place,
            file=file,
            record=first_record + number * block_records,
            offset=start,
        )
        for number, ((start, stop), (place, end)) in enumerate(places)
    ]
    return found[0] if len(found) == 1 else b"".join(found)


class GzipWriter:
    """Writes framed records as a gzip file that can be read from each block on; `finish` ends it.

    Checks both checksums of each record once more. Memory: one block, plain and compressed.

    Attributes: `records` and `bytes` written so far, `block_offsets` where blocks begin, `unpacked_offsets` where their
    contents do in what the file unpacks to, and where they end (one number more).
    """

    def __init__(self, sink: _Sink, block_records: int) -> None:
        self._sink, self._block_records = sink, block_records
        self._digest, self._unpacked_crc32 = Digest(), 0
        self._held, self._held_records = bytearray(), 0
        self.records = self.bytes = 0
        self.block_offsets: list[int] = []
        self.unpacked_offsets = [0]
        self._send(HEADER)

    def write(self, data: NDArray[np.uint8]) -> None:
        """Append whole framed records, end to end. Raises CorruptionError for anything else."""
        place = self.unpacked_offsets[-1] + len(self._held)
        number = self.records + self._held_records
        offsets = record_offsets(data, file="the records of a task", first_record=number, base_offset=place)
        first, count = 0, len(offsets) - 1
        while first < count:
            stop = min(count, first + self._block_records - self._held_records)
            self._held += data[offsets[first] : offsets[stop]].data
            self._held_records += stop - first
            if self._held_records == self._block_records:
                self._put()
            first = stop

    def finish(self) -> None:
        """Write the last, shorter block, and the end of the file."""
        if self._held_records:
            self._put()
        self._send(trailer(self._unpacked_crc32, self.unpacked_offsets[-1]))

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes written, in hex."""
        return self._digest.sha256

    @property
    def crc32c(self) -> str:
        """CRC-32C of all bytes written, 8 hex digits."""
        return self._digest.crc32c

    def _put(self) -> None:
        self.block_offsets.append(self.bytes)
        self.unpacked_offsets.append(self.unpacked_offsets[-1] + len(self._held))
        self._unpacked_crc32 = zlib.crc32(self._held, self._unpacked_crc32)
        self._send(pack(self._held))
        self.records += self._held_records
        self._held, self._held_records = bytearray(), 0

    def _send(self, data: bytes) -> None:
        self._sink.write(data)
        self._digest.add(data)
        self.bytes += len(data)


def _unpacked(block: Buffer, size: int) -> tuple[bytes, tuple[str, str, str]]:
    """The content of a block and its fault: what, got and allowed of an error, or _NOTHING."""
    inflater = zlib.decompressobj(_RAW)
    try:
        data = inflater.decompress(block, size + 1)
    except zlib.error as error:
        return b"", ("a gzip block is damaged", str(error), "deflate")
    allowed = f"{size} bytes"
    if len(data) > size:
        return b"", ("a gzip block unpacks to more than its manifest says", f"more than {size} bytes", allowed)
    if inflater.eof or block[-len(MARK) :] != MARK:
        got = "the end of the stream" if inflater.eof else f"{len(data)} bytes unpacked, and no mark"
        return b"", ("a gzip block does not end as one", got, f"{size} bytes unpacked, and the mark {MARK.hex()}")
    if len(data) < size:
        return b"", ("a gzip block unpacks to less than its manifest says", f"{len(data)} bytes", allowed)
    return data, _NOTHING
