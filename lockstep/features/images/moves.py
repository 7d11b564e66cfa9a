"""Operations that move pixels: crop after padding, flip, rotate, scale. Whole-number arithmetic: the same bytes on any
machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.aligned import aligned_empty
from lockstep.features.images.augment import Draws
from lockstep.features.images.operation import Images, Operation, need

Padding = Literal["zero", "edge", "reflect"]
Axis = Literal["horizontal", "vertical", "both"]
ONE = 1 << 16  # of fixed-point numbers: 16 bits before, 16 after the point
ANGLES_PER_DEGREE = 64


@dataclass(frozen=True, slots=True)
class Crop(Operation):
    """A window of the image's own size out of the image with `pixels` more on each side, anywhere with equal chance
    (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009; 4 pixels in He and others, 2016).
    """

    pixels: int
    padding: Padding = "zero"

    def __post_init__(self) -> None:
        need(self, 0 <= self.pixels <= 4096, "pixels from 0 to 4096")
        need(self, self.padding in get_args(Padding), " or ".join(get_args(Padding)))

    def check(self, shape: tuple[int, int, int]) -> None:
        right = self.padding != "reflect" or self.pixels < min(shape[:2])
        need(self, right, f"fewer pixels to reflect than the image has: {min(shape[:2]) - 1} at most")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.move_kernels import crop

        top = draws.between(-self.pixels, self.pixels, 0)
        left = draws.between(-self.pixels, self.pixels, 1)
        out = aligned_empty(images.shape)
        crop(images, top, left, get_args(Padding).index(self.padding), out)
        return out


@dataclass(frozen=True, slots=True)
class Flip(Operation):
    """Mirrored with probability 1/2: left and right, top and bottom, or each by itself."""

    axis: Axis = "horizontal"

    def __post_init__(self) -> None:
        need(self, self.axis in get_args(Axis), " or ".join(get_args(Axis)))

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.move_kernels import flip

        never = np.zeros(len(images), dtype=np.int64)
        columns = never if self.axis == "vertical" else draws.below(2, 0)
        rows = never if self.axis == "horizontal" else draws.below(2, 1)
        out = aligned_empty(images.shape)
        flip(images, rows, columns, out)
        return out


@dataclass(frozen=True, slots=True)
class Rotate90(Operation):
    """Turned by 0, 90, 180 or 270 degrees, each with equal chance; images must be square."""

    def check(self, shape: tuple[int, int, int]) -> None:
        need(self, shape[0] == shape[1], f"square images; these are {shape[0]} x {shape[1]} (flip:both turns by 180)")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.move_kernels import turn

        out = aligned_empty(images.shape)
        turn(images, draws.below(4, 0), out)
        return out


@dataclass(frozen=True, slots=True)
class Rotate(Operation):
    """Turned about the middle by up to `degrees` either way, in steps of 1/64 degree; bilinear, black outside."""

    degrees: float

    def __post_init__(self) -> None:
        need(self, 0 <= self.degrees <= 180, "degrees from 0 to 180")

    def apply(self, images: Images, draws: Draws) -> Images:
        most = round(self.degrees * ANGLES_PER_DEGREE)
        angle = draws.between(-most, most, 0) % (360 * ANGLES_PER_DEGREE)
        cosines, sines = _turns()
        cos, sin = cosines[angle], sines[angle]
        # Where a pixel of the result comes from: the turn back.
        return _affine(images, cos, sin, -sin, cos)


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """Made `low` to `high` times as large about the middle and cut to its own size; bilinear, black outside."""

    low: float
    high: float

    def __post_init__(self) -> None:
        need(self, 1 / 16 <= self.low <= self.high <= 16, "two factors in order, from 0.0625 to 16")

    def apply(self, images: Images, draws: Draws) -> Images:
        factor = draws.between(round(self.low * ONE), round(self.high * ONE), 0)
        back = ((1 << 32) + factor // 2) // factor
        zero = np.zeros_like(back)
        return _affine(images, back, zero, zero, back)


@cache
def _turns() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cosine and sine of each 1/64 degree in 1/65536: rounded so far from a tie that any libm gives the same."""
    angles = [math.radians(step / ANGLES_PER_DEGREE) for step in range(360 * ANGLES_PER_DEGREE)]
    return tuple(np.array([round(of(a) * ONE) for a in angles], dtype=np.int64) for of in (math.cos, math.sin))  # type: ignore[return-value]  # a generator has no length to mypy


def _affine(
    images: Images,
    xx: NDArray[np.int64],
    xy: NDArray[np.int64],
    yx: NDArray[np.int64],
    yy: NDArray[np.int64],
) -> Images:
    """Each pixel from where the matrix ((xx, xy), (yx, yy)), (n,) each in 1/65536, leads about the middle."""
    from lockstep.features.images.move_kernels import affine

    out = aligned_empty(images.shape)
    affine(images, xx, xy, yx, yy, out)
    return out
