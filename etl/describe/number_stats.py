"""What many numbers are like, in memory that does not grow with them: exact sums, and values picked by their places."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.sample_id import splitmix64_array

KEPT = 1 << 17  # values held for median, histogram and distinct values; of more, about half of that to all of it
PIECE = 1 << 20  # values looked at together
MAX_PIECES = 1000  # held apart


@dataclass
class NumberStats:
    """Collects numbers of one type, 1-dimensional arrays of it.

    Counts, least, greatest, mean and deviation are of all finite values. `picked` holds them all, in their order, while
    they are KEPT at most; then those whose place among all has a hash below a bound, so about as many from everywhere,
    whatever period the values have. Memory: 16 bytes a kept value.
    """

    nans: int = 0
    infinite: int = 0
    zeros: int = 0
    count: int = 0
    least: Any = None
    most: Any = None
    mean: float = 0.0
    _squares: float = 0.0  # the sum of squared distances from the mean
    _bits: int = 0  # a value is picked where as many first bits of its place's hash are 0
    _picked: list[npt.NDArray[Any]] = field(default_factory=list)
    _hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _held: int = 0  # values in all of _picked

    def add(self, values: npt.NDArray[Any]) -> None:
        """Take in (n,) more numbers."""
        for start in range(0, len(values), PIECE):
            self._add(values[start : start + PIECE])

    @property
    def whole(self) -> bool:
        """Whether `picked` are all finite values."""
        return self._bits == 0

    @property
    def picked(self) -> npt.NDArray[Any]:
        """(m,) finite values, m <= KEPT; there must have been one."""
        return np.concatenate(self._picked)

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite values."""
        return math.sqrt(self._squares / max(self.count, 1))

    def _add(self, values: npt.NDArray[Any]) -> None:
        if values.dtype.kind == "f":
            nans, infinite = np.isnan(values), np.isinf(values)
            self.nans += int(nans.sum())
            self.infinite += int(infinite.sum())
            values = values[~(nans | infinite)]
        if not len(values):
            return
        self._pick(values)
        self.zeros += int((values == 0).sum())
        least, most = values.min(), values.max()
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        wide = values.astype(np.float64)
        total = self.count + len(wide)
        mean = float(np.mean(wide / len(wide)) * len(wide))  # divided first: a sum of large ones would be infinite
        with np.errstate(over="ignore"):
            squares = float(np.square(wide - mean).sum())
            apart = (mean / 2 - self.mean / 2) * 2
            self._squares += squares + apart * (apart * (self.count * len(wide) / total))
        self.mean = self.mean * (self.count / total) + mean * (len(wide) / total)
        self.count = total

    def _pick(self, values: npt.NDArray[Any]) -> None:
        places = np.arange(self.count, self.count + len(values), dtype=np.uint64)
        hashes = splitmix64_array(places)
        here = self._chosen(hashes)
        picked, hashes = values[here], hashes[here]
        if not len(picked):
            return
        self._picked.append(picked)
        self._hashes.append(hashes)
        self._held += len(picked)
        # Pieces of a few values each would be more objects than values.
        if self._held > KEPT or len(self._picked) > MAX_PIECES:
            self._join()

    def _join(self) -> None:
        picked, hashes = np.concatenate(self._picked), np.concatenate(self._hashes)
        while len(hashes) > KEPT:
            self._bits += 1
            here = self._chosen(hashes)
            picked, hashes = picked[here], hashes[here]
        self._picked, self._hashes, self._held = [picked], [hashes], len(picked)

    def _chosen(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        return hashes < np.uint64(1 << (64 - self._bits)) if self._bits else np.ones(len(hashes), dtype=np.bool_)
