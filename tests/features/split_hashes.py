"""Split hashes one at a time: the plain form that the compiled ones are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def unit_hash(value: bytes, seed: int) -> int:
    """An unsigned 64-bit hash of a name, as uniform as SHA-256's."""
    digest = hashlib.sha256(b"split" + (seed % (1 << 64)).to_bytes(8, "little") + value).digest()
    return int.from_bytes(digest[:8], "little")


def share_of(value: int, weights: Sequence[int]) -> int:
    """The index of the share of `weights`, in order, into which an unsigned 64-bit hash falls."""
    below = 0
    for index, weight in enumerate(weights):
        below += weight
        if (value * sum(weights)) >> 64 < below:
            return index
    raise AssertionError(f"hash {value} is in none of {weights}")
