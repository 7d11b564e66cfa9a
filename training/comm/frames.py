"""Frames between ranks.

    offset  size  field
    0       4     length      bytes of payload, uint32 little-endian
    4       4     tag         collective, operation and dtype; in the highest byte a broadcast's root, modulo 256
    8       8     generation  of the run
    16      8     sequence    frames sent before on this connection
    24      8     total       bytes of the whole buffer of this collective
    32      4     call        collectives of this communicator before this one; sends and receives do not count
    36      4     crc32c      of bytes 0..35 and the payload
    40      ...   payload

The receiver always knows which frame must come next. It checks every field against that, and allocates nothing by a
number from the wire.

Instead of a frame, a rank may send a word of fixed size: `LEFT` (it has closed, without an error), `ENDED` (it gives
up, with the reason) or `STALLED` (its deadline has passed; it reports which rank it waits for, and asks the receiver to
do the same). A connection that ends without a word means that the rank has died.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_FIELDS = struct.Struct("<IIQQQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size

KINDS = {
    "all_reduce": 1,
    "broadcast": 2,
    "all_gather_ragged": 3,
    "reduce_scatter": 4,
    "all_gather_parts": 5,
    "send": 6,
    "barrier": 7,
    "all_gather": 8,  # only over shared memory; over TCP it is all_gather_parts
    "all_to_all_ragged": 9,
}
_OPS = {"": 0, "sum": 1, "max": 2, "mean": 3, "min": 4}
_DTYPES = {"uint8": 1, "int64": 2, "float32": 3, "float64": 4, "int32": 5, "float16": 6, "bfloat16": 7}

LEFT, ENDED, STALLED = WORDS = (0xFD << 16, 0xFE << 16, 0xFF << 16)
WORD_BYTES = 512  # payload of a word: UTF-8, padded with zeros


class Expected(NamedTuple):
    """The fields of the only frame that may come next."""

    length: int
    tag: int
    generation: int
    sequence: int
    total: int
    call: int = 0

    def pack(self) -> bytes:
        """The fields in the format of the header."""
        return _FIELDS.pack(*self)


@cache
def tag_of(kind: str, op: str, dtype: np.dtype[Any], root: int = 0) -> int:
    """The tag of a collective, by which ranks notice at the first frame if another one calls another collective, uses
    another dtype or broadcasts from another `root`."""
    return (root & 255) << 24 | KINDS[kind] << 16 | _OPS[op] << 8 | _DTYPES[dtype.name]


def describe_tag(tag: int) -> str:
    """A tag as text, for errors."""

    def name(table: dict[str, int], code: int) -> str:
        return next((key for key, value in table.items() if value == code), f"unknown({code})")

    kind = name(KINDS, tag >> 16 & 255)
    root = f"from rank {tag >> 24}" if kind == "broadcast" else ""
    return " ".join(part for part in (kind, name(_OPS, tag >> 8 & 255), name(_DTYPES, tag & 255), root) if part)


def pack_header(fields: bytes, payload: NDArray[np.uint8]) -> bytes:
    """Header of a frame with these packed fields, whose payload is the flat, contiguous uint8 array `payload`."""
    return fields + _CRC.pack(google_crc32c.extend(google_crc32c.value(fields), payload))


def check_header(header: bytes | bytearray, fields: bytes) -> str | None:
    """Compare the packed fields with the expected ones, before any payload is read: None if they are equal, else the
    difference as text.
    """
    if header.startswith(fields):
        return None
    expected, got = Expected(*_FIELDS.unpack(fields)), Expected(*_FIELDS.unpack_from(header))
    for name in ("generation", "call", "tag", "total", "sequence", "length"):
        mine, theirs = getattr(expected, name), getattr(got, name)
        if mine != theirs:
            if name == "tag":
                mine, theirs = describe_tag(mine), describe_tag(theirs)
            return f"{name} {theirs} instead of {mine}"
    return None


def check_payload(header: bytes | bytearray, payload: NDArray[np.uint8]) -> str | None:
    """Check the payload against the frame's checksum: None if it is right, else the difference as text."""
    (stated,) = _CRC.unpack_from(header, _FIELDS.size)
    crc = google_crc32c.extend(google_crc32c.value(bytes(header[: _FIELDS.size])), payload)
    return None if crc == stated else f"checksum {crc:08x} where the frame says {stated:08x}"


def pack_word(tag: int, generation: int, sequence: int, text: str) -> bytes:
    """A whole frame that reports a rank's state: `tag` is LEFT, ENDED or STALLED."""
    payload = np.zeros(WORD_BYTES, np.uint8)
    data = text.encode()[:WORD_BYTES]
    payload[: len(data)] = np.frombuffer(data, np.uint8)
    return pack_header(Expected(WORD_BYTES, tag, generation, sequence, 0).pack(), payload) + payload.tobytes()


def read_word(frame: bytes, generation: int) -> tuple[int, str] | None:
    """Return (tag, text) if these HEADER_BYTES + WORD_BYTES are a word of this generation, else None."""
    if len(frame) != HEADER_BYTES + WORD_BYTES:
        return None
    fields = Expected(*_FIELDS.unpack_from(frame))
    if fields.tag not in WORDS or fields.generation != generation or fields.length != WORD_BYTES:
        return None
    if check_payload(frame[:HEADER_BYTES], np.frombuffer(frame, np.uint8)[HEADER_BYTES:]) is not None:
        return None
    return fields.tag, frame[HEADER_BYTES:].rstrip(b"\0").decode(errors="replace")


def is_word(header: bytes | bytearray) -> bool:
    """Whether this header is that of a word."""
    return int(_FIELDS.unpack_from(header)[1]) in WORDS
