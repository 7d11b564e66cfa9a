"""Kernels that parse foreign Examples: find the list of each requested feature, and read its values.

For rare forms (an entry with more than a name and a value, a feature with several lists, groups) a kernel returns
False, and the plain reader of lockstep/features/examples/foreign.py reads the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.storage.kernels import memory
from lockstep.storage.kernels.jit import kernels
from lockstep.storage.kernels.memory import load_u8, load_u32, same, store_u32, store_u64

_kernel = kernels(__name__, memory)

ABSENT = 0
_FEATURE_LISTS = 0x12  # the key of a SequenceExample's second field: an Example has none
BYTES, FLOATS, INTS = 1, 2, 3  # the field numbers of Feature's lists
_REMEMBERED = 256  # entries of a record whose fields are predicted from the previous record


@njit
def _varint(at: Any, end: Any) -> Any:
    """A uint64 and its end; end 0 if it is malformed."""
    value, shift = np.uint64(0), 0
    while at < end and shift < 70:
        byte = np.uint64(load_u8(at))
        at += 1
        if shift < 64:
            value |= (byte & np.uint64(127)) << np.uint64(shift)
        if byte < np.uint64(128):
            return value, at
        shift += 7
    return value, 0


@njit
def _span(at: Any, end: Any) -> Any:
    """The start and end of a length-delimited payload; 0 if it extends beyond its message."""
    size, start = _varint(at, end)
    if start == 0 or size > np.uint64(end - start):
        return 0, 0
    return start, start + np.int64(size)


@njit
def _skip(at: Any, end: Any, unwanted: Any) -> Any:
    """The end of an unknown field at `at`; 0 if it is malformed, has the key `unwanted`, or is field 1 in a key that is
    longer than necessary.
    """
    key, at = _varint(at, end)
    if at == 0 or key >> np.uint64(3) == np.uint64(0) or key == np.uint64(0x0A) or key == np.uint64(unwanted):
        return 0
    wire = key & np.uint64(7)
    if wire == np.uint64(0):
        return _varint(at, end)[1]
    if wire == np.uint64(2):
        return _span(at, end)[1]
    size = 8 if wire == np.uint64(1) else 4 if wire == np.uint64(5) else end - at + 1
    return at + size if size <= end - at else 0


@njit
def _column_of(at: Any, size: Any, names: Any, name_ends: Any, guess: Any) -> Any:
    """The index of the requested field with this name, -1 for none; compares `guess` first."""
    count = len(name_ends) - 1
    for turn in range(count):
        field = guess + turn
        if field >= count:
            field -= count
        start = name_ends[field]
        if name_ends[field + 1] - start == size and same(at, names + start, size):
            return field
    return -1


@njit
def _inner(at: Any, end: Any, unwanted: Any) -> Any:
    """Read the field at `at`: start and end of its payload if it is field 1 (else 0), and the start of the next field,
    0 if _skip refuses it.
    """
    if load_u8(at) != 0x0A:
        return 0, 0, _skip(at, end, unwanted)
    start, stop = _span(at + 1, end)
    return start, stop, stop


@njit
def _entry(at: Any, end: Any, names: Any, name_ends: Any, guess: Any) -> Any:
    """Read one entry: its field (-1: not requested, -2: a rare form), and its list's kind, start and end."""
    if at >= end or load_u8(at) != 0x0A:
        return -2, 0, 0, 0
    name, stop = _span(at + 1, end)
    if name == 0 or stop >= end or load_u8(stop) != 0x12:
        return -2, 0, 0, 0
    value, value_end = _span(stop + 1, end)
    if value == 0 or value_end != end:
        return -2, 0, 0, 0
    field = _column_of(name, stop - name, names, name_ends, guess)
    if value == value_end:
        return field, ABSENT, 0, 0
    kind = np.int64(load_u8(value)) >> 3
    if load_u8(value) & 7 != 2 or kind < BYTES or kind > INTS:
        return -2, 0, 0, 0
    start, list_end = _span(value + 1, value_end)
    if start == 0 or list_end != value_end:
        return -2, 0, 0, 0
    return field, kind, start, list_end


@_kernel
def split(starts: Any, ends: Any, names: Any, name_ends: Any, kinds: Any, closed: Any, found: Any) -> Any:
    """Find each requested feature's list in the records between the addresses `starts` and `ends`, (n,) int64.

    `names` is the address of the fields' names end to end, `kinds` (k,) are the kinds of list that they must have, 0
    for any. Start and end addresses are written to `found` (k, n, 2) int64, 0 for a missing list. Returns False for
    records of a rare form, with lists of other kinds, with a list of another name if they are `closed`, and for
    SequenceExamples with feature lists.
    """
    found[:] = 0
    guesses = np.zeros(_REMEMBERED, dtype=np.int64)
    for row in range(len(starts)):
        at, end, number = starts[row], ends[row], 0
        while at < end:
            entry, features_end, at = _inner(at, end, _FEATURE_LISTS)
            if at == 0:
                return False
            while entry < features_end:
                start, stop, entry = _inner(entry, features_end, 0)
                if entry == 0:
                    return False
                if start == 0:
                    continue
                place = min(number, _REMEMBERED - 1)
                field, kind, list_start, list_end = _entry(start, stop, names, name_ends, guesses[place])
                number += 1
                if field == -2:
                    return False
                if field < 0:
                    if closed and kind != ABSENT:
                        return False
                    continue
                guesses[place] = field
                if kind != ABSENT and kinds[field] != ABSENT and kind != kinds[field]:
                    return False
                found[field, row, 0], found[field, row, 1] = list_start, list_end
    return True


@njit
def _values(kind: Any, at: Any, end: Any, target: Any) -> Any:
    """Write a list's values to the address `target` (0: only count them); returns their number, -1 if malformed.

    Integers take 8 bytes each, floats 4; for bytes their address and length are written, 16 bytes.
    """
    count = 0
    while at < end:
        key = load_u8(at)
        if key == 0x0A:
            start, at = _span(at + 1, end)
            if start == 0:
                return -1
            if kind == BYTES:
                if target != 0:
                    store_u64(target + 16 * count, np.uint64(start))
                    store_u64(target + 16 * count + 8, np.uint64(at - start))
                count += 1
            elif kind == FLOATS:
                if (at - start) % 4 != 0:
                    return -1
                for place in range(start, at, 4):
                    if target != 0:
                        store_u32(target + 4 * count, load_u32(place))
                    count += 1
            else:
                while start < at:
                    value, start = _varint(start, at)
                    if start == 0:
                        return -1
                    if target != 0:
                        store_u64(target + 8 * count, value)
                    count += 1
        elif kind == FLOATS and key == 0x0D and end - at >= 5:
            if target != 0:
                store_u32(target + 4 * count, load_u32(at + 1))
            count += 1
            at += 5
        elif kind == INTS and key == 0x08:
            value, at = _varint(at + 1, end)
            if at == 0:
                return -1
            if target != 0:
                store_u64(target + 8 * count, value)
            count += 1
        else:
            return -1
    return count


@_kernel
def counts(kind: Any, places: Any, out: Any) -> Any:
    """Write the number of values in each row's list to `out` (n,) int64; `places` (n, 2). False for malformed lists."""
    for row in range(len(out)):
        out[row] = 0 if places[row, 0] == 0 else _values(kind, places[row, 0], places[row, 1], 0)
        if out[row] < 0:
            return False
    return True


@_kernel
def values(kind: Any, places: Any, counts_: Any, target: Any) -> None:
    """Write all rows' values end to end to the address `target`, in the form of _values."""
    width = 4 if kind == FLOATS else 16 if kind == BYTES else 8
    for row in range(len(counts_)):
        if counts_[row] > 0:
            _values(kind, places[row, 0], places[row, 1], target)
            target += width * counts_[row]
