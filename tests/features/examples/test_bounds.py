"""Kernels read by address: here what they read ends where a page begins that nobody may touch, so that a byte too far
ends the process. Lengths near 2^63, varints without an end, groups, fields of number 0, nested lengths beyond the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from random import Random

import numpy as np
from numpy.typing import NDArray

from lockstep.features.examples.codec import RecordDecoder
from lockstep.features.examples.example import sized, varint
from lockstep.features.examples.foreign import fast_records
from lockstep.features.schema.schema import foreign_field
from lockstep.storage.formats.tfrecord import FOOTER_BYTES, FRAMING_BYTES, HEADER_BYTES, frame, masked_crc32c
from lockstep.storage.kernels import frames
from tests.builders.records import encode_batch
from tests.features.examples.test_example import ROW, SCHEMA, batch_of
from tests.fuzz.mutate import mutated

PAGE = mmap.PAGESIZE
LENGTHS = [0, 127, 128, 2**31 - 1, 2**32, 2**35 - 1, 2**35, 2**63 - 1, 2**63, 2**64 - 1, 2**69]
PARTS = [
    *map(varint, LENGTHS),
    b"\xff" * 12,
    b"\x80" * 10,
    b"\x80\x00",
    b"\x00",
    b"\x02",
    b"\x0b",
    b"\x0c",
    b"\x92\x00",
]
FIELDS = tuple(foreign_field(field.name, field.dtype, field.is_list) for field in SCHEMA if not field.is_tensor)


def guarded(data: bytes) -> NDArray[np.uint8]:
    """The bytes, (n,) uint8, with a page behind them that cannot be read."""
    pages = -(-len(data) // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * PAGE), PAGE, 0) == 0
    found = np.frombuffer(memory, dtype=np.uint8)[pages * PAGE - len(data) : pages * PAGE]
    found[:] = np.frombuffer(data, dtype=np.uint8)
    return found


def hostile(records: list[bytes]) -> list[bytes]:
    """Records with changes, some of them wrapped anew so that the outermost length is right."""
    found = []
    for number, record in enumerate(mutated(records, 250, 2000)):
        chance = Random(number)
        data, at = bytearray(record), chance.randrange(len(record) + 1)
        if number % 2:
            data[at : at + chance.choice((0, 1, 5))] = chance.choice(PARTS)
        found.append(sized(0x0A, bytes(data[3:])) if number % 3 else bytes(data))
    return found


def test_no_kernel_reads_beyond_a_record() -> None:
    good = encode_batch(SCHEMA, batch_of(ROW, {**ROW, "int": -5, "text": None, "many_ints": [1, 2**40] * 9}))
    decoder, taken = RecordDecoder(SCHEMA), 0
    for record in [*good, *hostile(good)]:
        data = guarded(frame(record))
        offsets = np.array([0, len(data)], dtype=np.int64)
        own = decoder._fast(data, offsets)
        theirs = fast_records(FIELDS, data, offsets[:-1] + HEADER_BYTES, offsets[1:] - FOOTER_BYTES)
        taken += own is not None and theirs is not None
    assert taken >= len(good)


def test_no_length_leads_beyond_a_file() -> None:
    whole = frame(b"abc") + frame(b"")
    for length in [*LENGTHS[1:-1], 2**64 - FRAMING_BYTES, 2**63 - FRAMING_BYTES, 19, 20]:
        word = struct.pack("<Q", length)
        for cut in range(FRAMING_BYTES + 3):
            data = guarded(whole + (word + struct.pack("<I", masked_crc32c(word)) + bytes(7))[:cut])
            offsets = np.empty(len(data) // FRAMING_BYTES + 1, dtype=np.int64)
            assert frames.scan(data.ctypes.data, len(data), offsets, True) == (-1 if cut else 2)
            assert frames.whole(data.ctypes.data, len(data)) == (35, 2)
