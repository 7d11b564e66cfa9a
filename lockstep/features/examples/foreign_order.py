"""Examples whose features lie in another order than ours, rewritten in ours: then the compiled decoder reads them.

Other writers differ from us in little: protobuf's libraries put the entries of a map in any order, and their writers
know features that nobody asks for. So entries are copied as they are, in our order, what nobody asks for left out, and
framed anew. All else (lengths in more bytes than need be, unknown fields) is refused, for a reader in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lockstep.features.arrow import rows_at_once
from lockstep.features.examples import varints
from lockstep.features.examples.varints import read_length, store_length
from lockstep.features.examples.wire import list_tag, sized
from lockstep.features.schema.fields import Field
from lockstep.storage.kernels import crc32c, memory
from lockstep.storage.kernels.crc32c import masked_crc32c
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import copy, load_u8, same, store_u8, store_u32, store_u64

HEADER_BYTES, FOOTER_BYTES = 12, 4
_MAX_PREFIX_BYTES = 6  # the tag of Example.features and a length of up to five bytes
_REMEMBERED = 256  # entries of a record whose fields are guessed from the record before

_kernel = kernels(__name__, varints, crc32c, memory)


@dataclass(frozen=True)
class Order:
    """Fields in our order, as the kernel takes them: the tags of their lists in a Feature (k,), their names end to end,
    and for those that are lists the entry of an empty one, end to end too.

    `name_ends`, `empty_ends` (k + 1,) int64 say where each begins and the last ends.
    """

    tags: NDArray[np.uint8]
    names: NDArray[np.uint8]
    name_ends: NDArray[np.int64]
    empties: NDArray[np.uint8]
    empty_ends: NDArray[np.int64]

    @classmethod
    def of(cls, fields: Sequence[Field]) -> Order:
        """For fields in byte order of their names."""
        names = [field.name.encode() for field in fields]
        tags = [list_tag(field) for field in fields]
        entries = [_empty_entry(tag, name) for tag, name in zip(tags, names, strict=True)]
        empties = [entry if field.is_list else b"" for field, entry in zip(fields, entries, strict=True)]
        return cls(np.array(tags, dtype=np.uint8), *_joined(names), *_joined(empties))

    @property
    def rows_at_once(self) -> int:
        """How many records to rewrite at once: each may become longer by an empty list for each field."""
        return rows_at_once(len(self.empties) + _MAX_PREFIX_BYTES)

    def rewritten(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """Framed records with exactly these fields, as the encoder would have them but for their values, whose form is
        not looked at; None where some record is of a form that is not read here.

        `data` uint8 holds framed records whose checksums are right, `offsets` (n + 1,) int64 say where. A scalar
        without a value is left out, a list that is missing is there and empty: who has more than rows_at_once of them
        takes them in parts, since they may take many times the memory of `data`.
        """
        more = (len(offsets) - 1) * (len(self.empties) + _MAX_PREFIX_BYTES)
        target = np.empty(int(offsets[-1] - offsets[0]) + more, dtype=np.uint8)
        size = _rewrite(
            data.ctypes.data,
            offsets,
            self.tags,
            self.names.ctypes.data,
            self.name_ends,
            self.empties.ctypes.data,
            self.empty_ends,
            target.ctypes.data,
        )
        return None if size < 0 else target[:size]


def _empty_entry(tag: int, name: bytes) -> bytes:
    return sized(0x0A, sized(0x0A, name) + bytes((0x12, 2, tag, 0)))


def _joined(parts: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    ends = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return np.frombuffer(b"".join(parts) or b"\0", dtype=np.uint8), ends


@njit
def _is_name(names: Any, name_ends: Any, field: Any, at: Any, size: Any) -> Any:
    start = name_ends[field]
    return name_ends[field + 1] - start == size and same(names + start, at, size)


@njit
def _field_of(names: Any, name_ends: Any, guess: Any, at: Any, size: Any) -> Any:
    """The field of a name, -1 for none; `guess` is looked at first."""
    if guess >= 0 and _is_name(names, name_ends, guess, at, size):
        return guess
    for field in range(len(name_ends) - 1):
        if _is_name(names, name_ends, field, at, size):
            return field
    return -1


@njit
def _find(
    at: Any, end: Any, tags: Any, names: Any, name_ends: Any, empty_ends: Any, guesses: Any, starts: Any, sizes: Any
) -> Any:
    """Where the last entry of each field lies in the features from `at` to `end`; False for another form."""
    starts[:] = 0
    sizes[:] = 0
    number = 0
    while at < end:
        begin = at
        if load_u8(at) != 0x0A:
            return False
        length, at = read_length(at + 1, end)
        stop = at + length
        if length < 2 or stop > end or load_u8(at) != 0x0A:
            return False
        size, name = read_length(at + 1, stop)
        at = name + size
        if size < 0 or at >= stop or load_u8(at) != 0x12:
            return False
        length, at = read_length(at + 1, stop)
        if length < 0 or at + length != stop:
            return False
        if length > 0:  # nobody else looks into a feature that is left out
            body, values = read_length(at + 1, stop)
            if load_u8(at) & 7 != 2 or not 1 <= load_u8(at) >> 3 <= 3 or body < 0 or values + body != stop:
                return False
        guess = guesses[number] if number < _REMEMBERED else -1
        field = _field_of(names, name_ends, guess, name, size)
        if number < _REMEMBERED:
            guesses[number] = field
        number += 1
        if field >= 0:
            scalar = empty_ends[field + 1] == empty_ends[field]
            empty = length == 0 or (scalar and length == 2 and load_u8(at) == tags[field] and load_u8(at + 1) == 0)
            starts[field], sizes[field] = begin, 0 if empty else stop - begin
        at = stop
    return True


@_kernel
def _rewrite(
    source: Any, offsets: Any, tags: Any, names: Any, name_ends: Any, empties: Any, empty_ends: Any, target: Any
) -> Any:
    """Write the records to the address `target`; returns how many bytes they take, -1 for another form."""
    fields = len(name_ends) - 1
    starts, sizes = np.zeros(fields, dtype=np.int64), np.zeros(fields, dtype=np.int64)
    guesses = np.full(_REMEMBERED, -1, dtype=np.int64)
    out = target
    for record in range(len(offsets) - 1):
        at, end = source + offsets[record] + HEADER_BYTES, source + offsets[record + 1] - FOOTER_BYTES
        if at < end:
            if load_u8(at) != 0x0A:
                return -1
            length, at = read_length(at + 1, end)
            if length < 0 or at + length != end:
                return -1
        if not _find(at, end, tags, names, name_ends, empty_ends, guesses, starts, sizes):
            return -1
        body: Any = 0
        for field in range(fields):
            body += sizes[field] if sizes[field] > 0 else empty_ends[field + 1] - empty_ends[field]
        begin = out + HEADER_BYTES
        store_u8(begin, np.uint8(0x0A))
        place = store_length(begin + 1, body)
        for field in range(fields):
            size = sizes[field]
            start = starts[field]
            if size == 0:
                size, start = empty_ends[field + 1] - empty_ends[field], empties + empty_ends[field]
            copy(place, start, size)
            place += size
        store_u64(out, np.uint64(place - begin))
        store_u32(out + 8, np.uint32(masked_crc32c(out, 8)))
        store_u32(place, np.uint32(masked_crc32c(begin, place - begin)))
        out = place + FOOTER_BYTES
    return out - target
