"""The IDX format of MNIST and its kin, plain or packed, checked byte for byte against what its header promises.

offset 0   two zero bytes, the type of the values (08: unsigned byte), the number of dimensions d
offset 4   d big-endian uint32: the sizes; for images n, height, width (and channels), for labels n
behind     the values in C order, nothing else
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from etl.input.forward import Forward
from etl.input.ranges import Source
from etl.input.unpack import PLAIN
from lockstep.storage.errors import DataError

_UNSIGNED_BYTE = 0x08
MAX_SIDE = 4096
MAX_RECORDS = (1 << 31) - 1
# A packed file does not tell its length, so its header must not be able to ask for all memory.
MAX_RECORD_BYTES = MAX_SIDE * MAX_SIDE * 4


@dataclass(frozen=True, slots=True)
class IdxFile:
    """An IDX file of unsigned bytes: place, codec and dimensions, the first being the number of records."""

    url: str
    codec: str
    shape: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        """Where the values begin."""
        return 4 + 4 * len(self.shape)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape[1:])

    @property
    def total_bytes(self) -> int:
        """Decompressed length of the file."""
        return self.header_bytes + self.shape[0] * self.record_bytes

    def position(self, record: int) -> int:
        """Where a record begins, in decompressed bytes."""
        return self.header_bytes + record * self.record_bytes


def read_header(source: Source) -> IdxFile:
    """Read and check the header, and for a plain file its length. Raises DataError naming the file."""
    with Forward(source.url, source.codec) as stream:
        head = stream.at(0, 4)
        if len(head) < 4 or head[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or not 1 <= head[3] <= 4:
            raise _bad(
                source.url, f"it begins with {head.hex(' ')}", "00 00 08 and 1 to 4 dimensions", "IDX of unsigned bytes"
            )
        sizes = stream.at(4, 4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise _short(source.url, 4 + len(sizes), f"a header of {4 + 4 * head[3]} bytes")
    file = IdxFile(source.url, source.codec, struct.unpack(f">{head[3]}I", sizes))
    sides = all(1 <= size <= MAX_SIDE for size in file.shape[1:])
    if not (sides and 1 <= file.shape[0] <= MAX_RECORDS and file.record_bytes <= MAX_RECORD_BYTES):
        allowed = f"1 to {MAX_RECORDS} records, sides 1 to {MAX_SIDE}, {MAX_RECORD_BYTES} bytes a record at most"
        raise _bad(source.url, f"dimensions {file.shape}", allowed, "an image set")
    if source.codec == PLAIN and source.size_bytes != file.total_bytes:
        raise _length(file, source.size_bytes)
    return file


def read_records(file: IdxFile, first: int, count: int, batch: int) -> Iterator[bytes]:
    """Yield the bytes of records `first` to `first + count`, `batch` records at a time.

    A packed file is read through, to its end where the range ends there, so that a cut or overlong one is noticed.
    Raises DataError.
    """
    with Forward(file.url, file.codec) as stream:
        for start in range(first, first + count, batch):
            wanted = min(batch, first + count - start) * file.record_bytes
            data = stream.at(file.position(start), wanted)
            if len(data) < wanted:
                # What lies before the range was skipped, so where it ended is not known.
                skipped = start == first > 0 and not data
                raise _length(file, file.position(start) + len(data), "or fewer" if skipped else "")
            yield data
        if first + count == file.shape[0] and (rest := stream.at(file.total_bytes, 1 << 20)):
            raise _length(file, file.total_bytes + len(rest), "or more")


def _length(file: IdxFile, got: int, more: str = "") -> DataError:
    return _short(
        file.url, got, f"{file.total_bytes} bytes, as its header says: {' x '.join(map(str, file.shape))}", more
    )


def _short(url: str, got: int, allowed: str, more: str = "") -> DataError:
    return DataError(
        f"IDX file {url} has the wrong length",
        got=f"{got} bytes {more}".strip(),
        allowed=allowed,
        next_step="Fetch the file again; compare its digest with the origin's.",
    )


def _bad(url: str, got: str, allowed: str, what: str) -> DataError:
    return DataError(f"{url} is not {what}", got=got, allowed=allowed, next_step="Check --input and --source.")
