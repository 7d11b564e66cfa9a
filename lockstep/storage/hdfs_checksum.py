"""HDFS's own checksum, worked out for a local file: whether two files are equal, without reading the remote one.

DataNodes keep a CRC-32C of every 512 bytes, big-endian. The checksum of an HDFS block is the MD5 of its CRCs, that of a
file the MD5 of its blocks' MD5s, padded with zeros to the size of the buffer in which Hadoop collects them: 32 bytes,
doubled until they fit (`FileChecksumHelper` digests the whole buffer; kept so by Hadoop for compatibility).
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import BinaryIO

import google_crc32c

from lockstep.storage.files.interface import StoredChecksum

_ALGORITHM = re.compile(r"MD5-of-(\d+)MD5-of-(\d+)CRC32C")
_HEADER = struct.Struct(">iq")  # bytes of a CRC, CRCs of an HDFS block (0 where the file has one block only)
_READ_BYTES = 1 << 22
_LEAST_BUFFER = 32
_ONE_BLOCK = 1 << 62


def same_as(stored: StoredChecksum, file: BinaryIO) -> bool | None:
    """Whether `file`, read from where it stands to its end, has the checksum `stored`; None for another algorithm
    than MD5 of CRC-32C, which cannot be worked out here.
    """
    found = _ALGORITHM.fullmatch(stored.algorithm)
    if found is None or len(stored.value) != _HEADER.size + 16:
        return None
    bytes_per_crc, crcs_per_block = _HEADER.unpack_from(stored.value)
    if not 0 < bytes_per_crc <= _READ_BYTES or crcs_per_block < 0:
        return None
    return file_checksum(file, bytes_per_crc, crcs_per_block) == stored.value[_HEADER.size :]


def file_checksum(file: BinaryIO, bytes_per_crc: int, crcs_per_block: int) -> bytes:
    """The 16 bytes of HDFS's MD5 of MD5s of CRC-32Cs; `crcs_per_block` is 0 for a file of one HDFS block. Memory does
    not depend on the file's size.
    """
    # Whole CRCs a piece and a block, so that only the file's end cuts one.
    piece_bytes = _READ_BYTES // bytes_per_crc * bytes_per_crc
    block_bytes = crcs_per_block * bytes_per_crc or _ONE_BLOCK
    md5s, block, left = b"", hashlib.md5(), block_bytes
    while data := file.read(min(piece_bytes, left)):
        starts = range(0, len(data), bytes_per_crc)
        crcs = [google_crc32c.value(data[start : start + bytes_per_crc]) for start in starts]
        block.update(struct.pack(f">{len(crcs)}I", *crcs))
        left -= len(data)
        if not left:
            md5s, block, left = md5s + block.digest(), hashlib.md5(), block_bytes
    if left < block_bytes:
        md5s += block.digest()
    buffer_bytes = _LEAST_BUFFER
    while buffer_bytes < len(md5s):
        buffer_bytes *= 2
    return hashlib.md5(md5s.ljust(buffer_bytes, b"\0")).digest()
