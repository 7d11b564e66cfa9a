"""Sample ids, shard keys and split hashes: pure functions of a record's content and a seed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lockstep.features.arrow import flat

_MASK = (1 << 64) - 1
_LENGTH = struct.Struct("<Q")
_SIGNED = struct.Struct("<q")


def sample_id(fields: Sequence[bytes], occurrence: int) -> int:
    """The signed int64 id of a record.

    It is the first 8 bytes (little-endian) of SHA-256 over the fields, each after its length as 8 little-endian bytes,
    and then the occurrence number as 8 bytes. The lengths distinguish ("ab", "c") from ("a", "bc").
    """
    digest = hashlib.sha256()
    for field in fields:
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    digest.update(_LENGTH.pack(occurrence))
    return int(_SIGNED.unpack_from(digest.digest())[0])


def sample_ids(columns: Sequence[pa.Array], occurrences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute the sample_id of each row: (n,) strings or bytes of any width without nulls, (n,) int64 -> (n,) int64.

    Needs one column or more. Memory: twice the longest row.
    """
    from lockstep.features import sample_id_kernel as kernel

    raw = [column if _is_large(column) else column.cast(pa.binary()) for column in columns]
    data, ends, widths = np.zeros((3, len(raw)), dtype=np.int64)
    longest = np.zeros(len(occurrences), dtype=np.int64)
    for number, column in enumerate(raw):
        _, offsets, values = column.buffers()
        widths[number] = 8 if _is_large(column) else 4
        ends[number] = 0 if offsets is None else offsets.address + column.offset * widths[number]
        data[number] = 0 if values is None else values.address
        longest += np.asarray(pc.binary_length(column)) + 8
    scratch = np.empty(int(longest.max(initial=0)) + 88, dtype=np.uint8)
    out = np.empty(len(occurrences), dtype=np.uint64)
    kernel.row_hashes(data, ends, widths, np.ascontiguousarray(occurrences), scratch.ctypes.data, out)
    del raw  # the kernel reads the columns by address
    return out.view(np.int64)


def text_of(column: pa.Array) -> pa.Array:
    """The values of an id or group column in the form that is hashed, (n,): text, decimal digits of numbers, or bytes.
    Equal numbers have equal text: -0.0 becomes 0.
    """
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return column
    return (pc.add(column, 0.0) if pa.types.is_floating(column.type) else column).cast(pa.string())


def _is_large(column: pa.Array) -> bool:
    return bool(pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type))


def splitmix64(value: int) -> int:
    """Mix 64 unsigned bits (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute splitmix64 of each value: (n,) uint64 -> (n,) uint64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shard_keys(samples: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """Compute the keys that order samples within their split: splitmix64(sample xor splitmix64(seed)).

    (n,) int64 -> (n,) uint64.
    """
    return splitmix64_array(samples.view(np.uint64) ^ np.uint64(splitmix64(seed & _MASK)))


def shard_of(key: int, num_shards: int) -> int:
    """The shard of a key: floor(key * num_shards / 2**64)."""
    return (key * num_shards) >> 64


def unit_hashes(ids: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """A uniform hash of each sample id, by which splits are assigned: (n,) int64 -> (n,) uint64.

    The first 8 bytes (little-endian) of SHA-256 over b"split", the seed and the id, each as 8 little-endian bytes.
    """
    from lockstep.features import sample_id_kernel as kernel

    scratch, out = np.empty(128, dtype=np.uint8), np.empty(len(ids), dtype=np.uint64)
    kernel.unit_hashes(np.ascontiguousarray(ids), np.uint64(seed & _MASK), scratch.ctypes.data, out)
    return out


def group_hashes(names: pa.Array, seed: int) -> NDArray[np.uint64]:
    """Hash each group's name as unit_hashes hashes an id, over the name's UTF-8 bytes.

    names (n,) strings or binaries without nulls -> (n,) uint64. Memory: twice the longest name.
    """
    from lockstep.features import sample_id_kernel as kernel

    ends, data = flat(names)
    scratch = np.empty(int(np.diff(ends).max(initial=0)) + 96, dtype=np.uint8)
    out = np.empty(len(names), dtype=np.uint64)
    kernel.group_hashes(data.ctypes.data, ends, np.uint64(seed & _MASK), scratch.ctypes.data, out)
    return out
