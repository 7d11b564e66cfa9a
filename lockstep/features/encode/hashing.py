"""Hashes and token numbers of whole columns. The hash is XXH64, so any program can compute a bucket.

Text is hashed as its UTF-8 bytes, bytes unchanged, int64 and uint64 as their 8 little-endian bytes. The bucket is the
hash as a signed number modulo the number of buckets, never negative. With seed 42 that is Spark SQL's
`pmod(xxhash64(column), buckets)`, except for uint64, which Spark reads as decimals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lockstep.features.arrow import flat


def hash_values(column: pa.Array, seed: int) -> NDArray[np.int64]:
    """XXH64 of each value of a column of strings, binaries, int64 or decimals for uint64: (n,) int64.

    A null has the hash of an empty string or of 0.
    """
    if pa.types.is_int64(column.type):
        return _hash_words(np.asarray(column.fill_null(0), dtype=np.int64).view(np.uint64), seed).view(np.int64)
    if pa.types.is_decimal(column.type):
        return _hash_words(np.asarray(column.cast(pa.uint64()).fill_null(0), dtype=np.uint64), seed).view(np.int64)
    return _hash_bytes(*flat(column), seed).view(np.int64)


def buckets_of(column: pa.Array, buckets: int, seed: int) -> NDArray[np.int64]:
    """The bucket 0..buckets-1 of each value, (n,) int64; the caller handles nulls."""
    return hash_values(column, seed) % np.int64(buckets)  # not negative: the remainder has the sign of the divisor


class TokenTable:
    """A hash table of known texts, which looks up a whole column in one call."""

    def __init__(self, tokens: Sequence[str]) -> None:
        from lockstep.features.encode.hash_kernels import fill_table

        self._offsets, self._data = flat(pa.array(tokens, type=pa.string()))
        self._hashes = _hash_bytes(self._offsets, self._data, 0)
        self._slots = np.full(1 << (2 * len(tokens)).bit_length(), -1, dtype=np.int64)  # at most half full
        fill_table(self._hashes, self._slots)

    def find(self, column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The token's index and the hash of each value of a string column, (n,) int64 each; -1 if it is not a token.

        The hash has seed 0. A null is looked up as the empty text: the caller handles nulls.
        """
        from lockstep.features.encode.hash_kernels import find_each

        offsets, data = flat(column)
        hashes = _hash_bytes(offsets, data, 0)
        found = np.empty(len(column), dtype=np.int64)
        find_each(offsets, data, hashes, self._slots, self._offsets, self._data, self._hashes, found)
        return found, hashes.view(np.int64)


def _hash_bytes(offsets: NDArray[np.int64], data: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
    from lockstep.features.encode.hash_kernels import hash_each

    out = np.empty(len(offsets) - 1, dtype=np.uint64)
    hash_each(offsets, data, np.uint64(seed), out)
    return out


def _hash_words(words: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    from lockstep.features.encode.hash_kernels import hash_words

    out = np.empty(len(words), dtype=np.uint64)
    hash_words(words, np.uint64(seed), out)
    return out
