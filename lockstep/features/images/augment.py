"""Random numbers without a state: each is a function of (seed, epoch, sample id) and of its own number.

A sample's numbers are the same on any rank, in any batch and order, and after any restart. The function is splitmix64
(lockstep.features.sample_id), used as a counter-based generator as in J. Salmon and others, "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011): for augmentation, not for secrecy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.features.sample_id import splitmix64, splitmix64_array
from lockstep.storage.errors import ConfigError

_PURPOSE = int.from_bytes(b"augment", "little")  # the same seed orders samples, too
_MASK = (1 << 64) - 1
_HALF = np.uint64(32)
PER_OPERATION = 16


@dataclass(frozen=True, slots=True)
class Draws:
    """The numbers of n samples that one operation may use; `states` (n,) uint64, `slot` its place in the list."""

    states: NDArray[np.uint64]
    slot: int = 0

    @classmethod
    def of(cls, seed: int, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Draws:
        """The numbers of samples in their epochs: (n,) int64 each."""
        keyed = splitmix64_array(sample_ids.astype(np.int64, copy=False).view(np.uint64) ^ _key(seed))
        epoch_keys = splitmix64_array(epochs.astype(np.int64, copy=False).view(np.uint64))
        return cls(splitmix64_array(keyed ^ epoch_keys))

    def at(self, slot: int) -> Draws:
        """The numbers of the operation at place `slot`: other ones than those of any other place."""
        return Draws(self.states, slot)

    def bits(self, number: int) -> NDArray[np.uint64]:
        """64 random bits a sample, (n,) uint64; `number` 0..15 tells an operation's draws apart."""
        if not 0 <= number < PER_OPERATION:
            raise _unknown(f"draw {number} of an operation", f"0 to {PER_OPERATION - 1}")
        return splitmix64_array(self.states ^ np.uint64(splitmix64(self.slot * PER_OPERATION + number)))

    def below(self, bound: int, number: int) -> NDArray[np.int64]:
        """A whole number 0..bound-1 a sample, (n,) int64; `bound` up to 2^31, each value equally likely to 2^-32."""
        if not 1 <= bound <= 1 << 31:
            raise _unknown(f"a draw below {bound}", f"below 1 to {1 << 31}")
        return (((self.bits(number) >> _HALF) * np.uint64(bound)) >> _HALF).astype(np.int64)

    def between(self, low: int, high: int, number: int) -> NDArray[np.int64]:
        """A whole number low..high a sample, both included: (n,) int64."""
        return low + self.below(high - low + 1, number)


def _unknown(got: str, allowed: str) -> ConfigError:
    return ConfigError(
        "an operation asks for a random number that there is not",
        got=got,
        allowed=allowed,
        next_step="Correct the operation.",
    )


def _key(seed: int) -> np.uint64:
    return np.uint64(splitmix64((seed ^ _PURPOSE) & _MASK))
