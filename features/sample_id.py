"""Sample ids, shard keys and split hashes: pure functions of a record's content and a seed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_LENGTH = struct.Struct("<Q")
_SIGNED = struct.Struct("<q")
_UINT = struct.Struct("<Q")


def sample_id(fields: Sequence[bytes], occurrence: int) -> int:
    """The signed int64 id of a record.

    The first 8 bytes (little-endian) of SHA-256 over each field, preceded by its length as 8 little-endian bytes, and
    then the occurrence number likewise as 8 bytes. The lengths keep ("ab", "c") and ("a", "bc") apart.
    """
    digest = hashlib.sha256()
    for field in fields:
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    digest.update(_LENGTH.pack(occurrence))
    return int(_SIGNED.unpack_from(digest.digest())[0])


def splitmix64(value: int) -> int:
    """Mix 64 bits (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014); unsigned in and out."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each value: (n,) uint64 -> (n,) uint64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shard_key(sample: int, seed: int) -> int:
    """The unsigned 64-bit key that orders a sample within its split: splitmix64(sample xor splitmix64(seed))."""
    return splitmix64((sample & _MASK) ^ splitmix64(seed & _MASK))


def shard_keys(samples: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """shard_key of each sample: (n,) int64 -> (n,) uint64."""
    return splitmix64_array(samples.view(np.uint64) ^ np.uint64(splitmix64(seed & _MASK)))


def shard_of(key: int, num_shards: int) -> int:
    """The shard of a key: floor(key * num_shards / 2**64)."""
    return (key * num_shards) >> 64


def unit_hash(value: bytes, seed: int) -> int:
    """An unsigned 64-bit hash of a group's name, as uniform as SHA-256's; compared with split boundaries."""
    digest = hashlib.sha256(b"split" + _UINT.pack(seed & _MASK) + value).digest()
    return int(_UINT.unpack_from(digest)[0])


def share_of(value: int, weights: Sequence[int]) -> int:
    """Which of the shares `weights` an unsigned 64-bit hash falls into: the index of its share, in order."""
    total, below = sum(weights), 0
    place = (value * total) >> 64
    for index, weight in enumerate(weights):
        below += weight
        if place < below:
            return index
    raise AssertionError(f"hash {value} lies in none of {weights}")  # place < total always holds
