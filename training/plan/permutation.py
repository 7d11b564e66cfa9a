"""Keyed permutations of 0..n-1, which know nothing of blocks or epochs: pure functions of a key. Decision 020.

`BlockPermutation` permutes 0..n-1 in O(1) memory, in both directions: an alternating Feistel network over the smallest
power of two >= n (M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM
J. Comput. 17(2), 1988), made to fit n by cycle walking (J. Black, P. Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002): a value outside 0..n-1 is encrypted again, less than twice on average. The round function is splitmix64
(G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). This is for shuffling, not
for secrecy.

A Feistel network over a few bits is not fair (5 items: chi-square 568 with 119 degrees of freedom at 20,000 keys), so
up to `TABLE_SIZE` items, and the records of a window, are instead sorted by a keyed hash of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.features.sample_id import splitmix64_array as mix

U64 = npt.NDArray[np.uint64]

# In theory four rounds suffice for a random round function; the others are cheap insurance for halves of 5 bits.
ROUNDS = 10
TABLE_SIZE = 1024


def derive_key(root: bytes, purpose: str, *numbers: int) -> bytes:
    """A key of 32 bytes; `purpose` and the numbers make different keys from one root."""
    text = ":".join([purpose, *(str(number) for number in numbers)])
    return hashlib.sha256(root + b"\0" + text.encode()).digest()


class BlockPermutation:
    """A bijection of 0..size-1 chosen by `key`; `forward` maps a place in the epoch to a block, `inverse` back."""

    def __init__(self, key: bytes, size: int) -> None:
        self.size = size
        bits = max(size - 1, 0).bit_length()
        # The value is split into `high` and `low` halves; each round xors one half with a keyed hash of the other.
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits // 2)) - 1)
        round_keys = hashlib.shake_256(key).digest(8 * ROUNDS)
        self._round_keys = np.frombuffer(round_keys, dtype="<u8").astype(np.uint64)
        self._table = shuffled(key, size) if size <= TABLE_SIZE else None

    def forward(self, places: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Blocks at these places: (n,) integers in 0..size-1 -> (n,) int64."""
        signed = self._checked(places)
        return self._walk(signed, range(ROUNDS)) if self._table is None else self._table[signed]

    def inverse(self, blocks: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Places of these blocks: (n,) integers in 0..size-1 -> (n,) int64."""
        signed = self._checked(blocks)
        if self._table is None:
            return self._walk(signed, range(ROUNDS - 1, -1, -1))
        return np.argsort(self._table)[signed]

    def _checked(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        signed = np.atleast_1d(np.asarray(values, dtype=np.int64))
        if signed.size and (signed.min() < 0 or signed.max() >= self.size):
            raise IndexError(f"values {signed.min()}..{signed.max()} are outside 0..{self.size - 1}")
        return signed

    def _walk(self, signed: npt.NDArray[np.int64], rounds: range) -> npt.NDArray[np.int64]:
        walked = self._encrypt(signed.astype(np.uint64), rounds)
        outside = np.flatnonzero(walked >= self.size)
        while outside.size:
            walked[outside] = self._encrypt(walked[outside], rounds)
            outside = outside[walked[outside] >= self.size]
        return walked.astype(np.int64)

    def _encrypt(self, values: U64, rounds: range) -> U64:
        low, high = values & self._low_mask, values >> self._low_bits
        for number in rounds:
            # Each step is its own inverse, so the inverse permutation takes the same steps in reverse order.
            if number % 2 == 0:
                high = high ^ (mix(low ^ self._round_keys[number]) & self._high_mask)
            else:
                low = low ^ (mix(high ^ self._round_keys[number]) & self._low_mask)
        return (high << self._low_bits) | low


def shuffled(key: bytes, count: int) -> npt.NDArray[np.int64]:
    """A keyed order of 0..count-1: (count,) int64. Equal hashes keep their order."""
    hashes = mix(mix(_starts([key])) ^ mix(np.arange(count, dtype=np.uint64)))
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


def shuffled_each(keys: Sequence[bytes], count: int) -> npt.NDArray[np.int64]:
    """The order of `shuffled` for each of n keys: (n, count) int64, computed by a kernel."""
    from lockstep.training.plan.permutation_kernel import orders  # here, so that making a plan does not load Numba

    found = np.empty((len(keys), count), dtype=np.int64)
    orders(_starts(keys), found)
    return found


def _starts(keys: Sequence[bytes]) -> U64:
    return np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8").astype(np.uint64)
