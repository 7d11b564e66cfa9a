"""Random numbers of augmentation: functions of (seed, epoch, sample id) and of a counter.

So they are the same on any rank, in any batch and order, and after any restart. The function is splitmix64
(lockstep.features.sample_id) as a counter-based generator, after J. Salmon and others, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011). It is not cryptographic. Decision record: docs/decisions/074-batches.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.features.sample_id import splitmix64, splitmix64_array
from lockstep.storage.errors import ConfigError

PER_OPERATION = 16
_PURPOSE = int.from_bytes(b"augment", "little")  # keeps these numbers apart from the plan's, which has the same seed
_MASK = (1 << 64) - 1
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of n samples for one operation; `states` (n,) uint64, `slot` the operation's index."""

    states: NDArray[np.uint64]
    slot: int = 0

    @classmethod
    def of(cls, seed: int, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Draws:
        """The random numbers of samples in their epochs: (n,) int64 each."""
        keyed = splitmix64_array(sample_ids.astype(np.int64, copy=False).view(np.uint64) ^ _key(seed))
        epoch_keys = splitmix64_array(epochs.astype(np.int64, copy=False).view(np.uint64))
        return cls(splitmix64_array(keyed ^ epoch_keys))

    def at(self, slot: int) -> Draws:
        """The random numbers of the operation at index `slot`, different for each index."""
        return Draws(self.states, slot)

    def bits(self, number: int) -> NDArray[np.uint64]:
        """Draw 64 random bits for each sample, (n,) uint64; `number` 0..15 is the index of the operation's draw."""
        if not 0 <= number < PER_OPERATION:
            raise _unknown(f"draw {number} of an operation", f"0 to {PER_OPERATION - 1}")
        return splitmix64_array(self.states ^ np.uint64(splitmix64(self.slot * PER_OPERATION + number)))

    def below(self, bound: int, number: int) -> NDArray[np.int64]:
        """An integer 0..bound-1 for each sample, (n,) int64; `bound` up to 2^31, values equally likely to 2^-32."""
        if not 1 <= bound <= 1 << 31:
            raise _unknown(f"a draw below {bound}", f"below 1 to {1 << 31}")
        return (((self.bits(number) >> _HALF) * np.uint64(bound)) >> _HALF).astype(np.int64)

    def between(self, low: int, high: int, number: int) -> NDArray[np.int64]:
        """An integer low..high, both included, for each sample: (n,) int64."""
        return low + self.below(high - low + 1, number)


def _unknown(got: str, allowed: str) -> ConfigError:
    return ConfigError(
        "an operation draws a random number out of range",
        got=got,
        allowed=allowed,
        next_step="Correct the operation.",
    )


def _key(seed: int) -> np.uint64:
    return np.uint64(splitmix64((seed ^ _PURPOSE) & _MASK))
