"""Sums and sums of squares without rounding: the same for any order and grouping of the values.

A float64 is a whole number times a power of two, so sums of floats are sums of whole numbers: NumPy adds the parts of
values of equal exponent, Python's long integers hold the sums. Mean and variance are fractions until the end, where
each is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.schema.fitted import Moments
from lockstep.storage.errors import DataError

_LIMB_BITS = 22
_LIMB = np.uint64((1 << _LIMB_BITS) - 1)
# Products of two limbs are less than 2^44, so sums of this many fit int64.
_CHUNK = 1 << 18
_MANTISSA_BITS = 53
_LEAST_EXPONENT = -1073  # of np.frexp, for the smallest float64
# A float is its 53 bits times 2^(exponent - 53): a whole number in units of the smallest such power of two.
FLOAT_UNIT = _LEAST_EXPONENT - _MANTISSA_BITS


@dataclass(slots=True)
class ExactSums:
    """`count` values, their sum in units of 2^unit and that of their squares in units of 2^(2 * unit).

    `unit` is 0 for whole numbers and FLOAT_UNIT for floats.
    """

    unit: int
    count: int = 0
    total: int = 0
    squares: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add values: (n,) int64 or uint64 where unit is 0, else (n,) float64, all finite."""
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            self.count += len(chunk)
            if chunk.dtype == np.uint64:
                self._add(chunk, np.zeros(len(chunk), dtype=bool), np.zeros(len(chunk), np.int64))
            elif self.unit == 0:
                # -2^63 has no positive int64: negate as unsigned, in two's complement.
                words = chunk.astype(np.int64).view(np.uint64)
                self._add(np.where(chunk < 0, ~words + np.uint64(1), words), chunk < 0, np.zeros(len(chunk), np.int64))
            else:
                mantissas, exponents = np.frexp(chunk)
                whole = np.ldexp(np.abs(mantissas), _MANTISSA_BITS).astype(np.uint64)
                self._add(whole, chunk < 0, exponents.astype(np.int64) - _LEAST_EXPONENT)

    def merge(self, other: ExactSums) -> None:
        """Add the sums of `other` to these."""
        if self.unit != other.unit:
            raise DataError(
                "sums in different units cannot be added",
                got=f"unit 2^-{other.unit}",
                allowed=f"unit 2^-{self.unit}",
                next_step="Fit the statistics again from one schema.",
            )
        self.count, self.total, self.squares = (
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
        )

    def moments(self, name: str, fitted_on: tuple[str, ...]) -> Moments:
        """Mean and variance, each rounded once. Raises DataError without any value and beyond float64."""
        if not self.count:
            raise DataError(
                f"field `{name}` has no value to fit a mean and a variance on",
                got=f"nothing but null and NaN in {', '.join(fitted_on)}",
                allowed="a number or more",
                next_step="Leave the field out or declare another encoding.",
            )
        step = Fraction(2) ** self.unit
        mean = Fraction(self.total, self.count)
        variance = Fraction(self.squares, self.count) - mean * mean
        try:
            rounded = float(mean * step), float(variance * step * step)
        except OverflowError:
            raise DataError(
                f"the variance of field `{name}` is beyond float64",
                got="values as large as 1e154 or more",
                allowed=f"a variance up to {np.finfo(np.float64).max}",
                next_step="Declare `bucketise`, or scale the field down.",
            ) from None
        return Moments(name=name, count=self.count, mean=rounded[0], variance=rounded[1], fitted_on=fitted_on)

    def _add(self, sizes: NDArray[np.uint64], negative: NDArray[np.bool_], shifts: NDArray[np.int64]) -> None:
        """Add values of `sizes` and signs, each shifted left by its own number of bits."""
        used, group = np.unique(shifts, return_inverse=True)
        limbs = [(sizes >> np.uint64(i * _LIMB_BITS) & _LIMB).astype(np.int64) for i in range(3)]
        for i, limb in enumerate(limbs):
            sums = _summed(np.where(negative, -limb, limb), group, len(used))
            self.total += sum(
                value << (shift + i * _LIMB_BITS) for shift, value in zip(used.tolist(), sums, strict=True)
            )
            for j in range(i, 3):
                sums = _summed(limb * limbs[j], group, len(used))
                places = [2 * shift + (i + j) * _LIMB_BITS + (i != j) for shift in used.tolist()]
                self.squares += sum(value << place for place, value in zip(places, sums, strict=True))


def _summed(values: NDArray[np.int64], group: NDArray[np.int64], groups: int) -> list[int]:
    if groups == 1:
        return [int(values.sum())]
    out = np.zeros(groups, dtype=np.int64)
    np.add.at(out, group, values)
    return out.tolist()
