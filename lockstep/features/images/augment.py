"""Image augmentation: crop, flip, rotate, scale, colour, cutout and mixup, parsed from text.

A command line only parses them, so NumPy is loaded by the first image. Decision record: docs/decisions/074-batches.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from lockstep.storage.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lockstep.features.images.random_numbers import Draws

Padding = Literal["zero", "edge", "reflect"]
Axis = Literal["horizontal", "vertical", "both"]
ONE = 1 << 16  # 1 in fixed point, with 16 fractional bits
ANGLES_PER_DEGREE = 64
Images: TypeAlias = "NDArray[np.uint8]"  # (n, H, W, C)
_NUMBERS: dict[str, type] = {"int": int, "float": float}


class Operation(ABC):
    """A random change of single images; subclasses are frozen dataclasses of its settings."""

    __slots__ = ()

    def check(self, shape: tuple[int, int, int]) -> None:  # noqa: B027 - most operations take any shape
        """Raise ConfigError if the operation does not apply to images of `shape` (H, W, C)."""

    @abstractmethod
    def apply(self, images: Images, draws: Draws) -> Images:
        """Changed images, a new array: (n, H, W, C) uint8, C-contiguous -> the same shape and dtype."""


def name_of(operation: Any) -> str:
    """An operation's name in --augment."""
    return type(operation).__name__.lower()


def need(operation: Any, right: bool, allowed: str) -> None:
    """Raise ConfigError with the operation's settings unless `right`."""
    if not right:
        settings = [str(getattr(operation, field.name)) for field in fields(operation)]
        raise ConfigError(
            f"--augment {name_of(operation)} is invalid",
            got=":".join([name_of(operation), *settings]),
            allowed=allowed,
            next_step="Correct --augment.",
        )


@dataclass(frozen=True, slots=True)
class Mixup:
    """Mixes each sample with another by a share drawn from Beta(alpha, alpha) (H. Zhang and others, "mixup: Beyond
    empirical risk minimization", 2018); a small `alpha` draws shares near 0 or 1.
    """

    alpha: float

    def __post_init__(self) -> None:
        need(self, 0.01 <= self.alpha <= 8, "alpha from 0.01 to 8")


@dataclass(frozen=True, slots=True)
class Crop(Operation):
    """Pads the image by `pixels` on each side and cuts out a window of its size at a uniformly random position
    (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009; 4 pixels in He and others, 2016).
    """

    pixels: int
    padding: Padding = "zero"

    def __post_init__(self) -> None:
        need(self, 0 <= self.pixels <= 4096, "pixels from 0 to 4096")
        need(self, self.padding in get_args(Padding), " or ".join(get_args(Padding)))

    def check(self, shape: tuple[int, int, int]) -> None:
        right = self.padding != "reflect" or self.pixels < min(shape[:2])
        need(self, right, f"at most {min(shape[:2]) - 1} pixels: reflection needs fewer than the image has")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.decode_many import aligned_empty
        from lockstep.features.images.kernels import crop

        top = draws.between(-self.pixels, self.pixels, 0)
        left = draws.between(-self.pixels, self.pixels, 1)
        out = aligned_empty(images.shape)
        crop(images, top, left, get_args(Padding).index(self.padding), out)
        return out


@dataclass(frozen=True, slots=True)
class Flip(Operation):
    """Mirrors with probability 1/2: left and right, top and bottom, or each independently."""

    axis: Axis = "horizontal"

    def __post_init__(self) -> None:
        need(self, self.axis in get_args(Axis), " or ".join(get_args(Axis)))

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.decode_many import aligned_empty
        from lockstep.features.images.kernels import flip

        columns = draws.below(1 if self.axis == "vertical" else 2, 0)  # below 1: never
        rows = draws.below(1 if self.axis == "horizontal" else 2, 1)
        out = aligned_empty(images.shape)
        flip(images, rows, columns, out)
        return out


@dataclass(frozen=True, slots=True)
class Rotate90(Operation):
    """Rotates by 0, 90, 180 or 270 degrees with equal probability; images must be square."""

    def check(self, shape: tuple[int, int, int]) -> None:
        need(self, shape[0] == shape[1], f"square images; these are {shape[0]} x {shape[1]} (flip:both rotates by 180)")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.decode_many import aligned_empty
        from lockstep.features.images.kernels import turn

        out = aligned_empty(images.shape)
        turn(images, draws.below(4, 0), out)
        return out


@dataclass(frozen=True, slots=True)
class Rotate(Operation):
    """Rotates about the centre by up to `degrees` either way, in steps of 1/64 degree; bilinear, black outside."""

    degrees: float

    def __post_init__(self) -> None:
        need(self, 0 <= self.degrees <= 180, "degrees from 0 to 180")

    def apply(self, images: Images, draws: Draws) -> Images:
        most = round(self.degrees * ANGLES_PER_DEGREE)
        angle = draws.between(-most, most, 0) % (360 * ANGLES_PER_DEGREE)
        cosines, sines = _turns()
        cos, sin = cosines[angle], sines[angle]
        # The inverse rotation: where a pixel of the result comes from.
        return _affine(images, cos, sin, -sin, cos)


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """Scales about the centre by a factor from `low` to `high`, crops to the old size; bilinear, black outside."""

    low: float
    high: float

    def __post_init__(self) -> None:
        need(self, 1 / 16 <= self.low <= self.high <= 16, "two factors in order, from 0.0625 to 16")

    def apply(self, images: Images, draws: Draws) -> Images:
        factor = draws.between(round(self.low * ONE), round(self.high * ONE), 0)
        back = ((1 << 32) + factor // 2) // factor
        zero = 0 * back
        return _affine(images, back, zero, zero, back)


@cache
def _turns() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cosine and sine of each 1/64 degree in 1/65536; none is near a rounding tie, so any libm gives the same."""
    import numpy as np

    angles = [math.radians(step / ANGLES_PER_DEGREE) for step in range(360 * ANGLES_PER_DEGREE)]
    return tuple(np.array([round(of(a) * ONE) for a in angles], dtype=np.int64) for of in (math.cos, math.sin))  # type: ignore[return-value]  # a generator has no length to mypy


def _affine(
    images: Images,
    xx: NDArray[np.int64],
    xy: NDArray[np.int64],
    yx: NDArray[np.int64],
    yy: NDArray[np.int64],
) -> Images:
    """Take each pixel from the position to which the matrix ((xx, xy), (yx, yy)) maps it about the centre.

    The elements are (n,) int64 in 1/65536.
    """
    from lockstep.features.images.decode_many import aligned_empty
    from lockstep.features.images.kernels import affine

    out = aligned_empty(images.shape)
    affine(images, xx, xy, yx, yy, out)
    return out


@dataclass(frozen=True, slots=True)
class Colour(Operation):
    """Changes brightness, contrast and saturation, in this order, each by a factor from 1 - setting to 1 + setting.

    Brightness scales each value, contrast its distance from the image's mean luma, saturation its distance from the
    pixel's luma (ITU-R 601); each result is rounded and clipped to 0..255. Saturation needs 3 channels.
    """

    brightness: float
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        settings = (self.brightness, self.contrast, self.saturation)
        need(self, all(0 <= setting <= 1 for setting in settings), "settings from 0 to 1")

    def check(self, shape: tuple[int, int, int]) -> None:
        need(self, shape[2] in (1, 3), f"images of 1 or 3 channels; these have {shape[2]}")
        need(self, not self.saturation or shape[2] == 3, "no saturation: images of 1 channel have none")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.decode_many import aligned_empty
        from lockstep.features.images.kernels import colour

        settings = (self.brightness, self.contrast, self.saturation)
        most = [round(setting * ONE) for setting in settings]
        factors = [draws.between(ONE - width, ONE + width, number) for number, width in enumerate(most)]
        out = aligned_empty(images.shape)
        colour(images, *factors, out)
        return out


@dataclass(frozen=True, slots=True)
class Cutout(Operation):
    """Sets a square of `side` pixels, its centre uniformly random in the image, to `fill` and clips it at the border
    (T. DeVries and G. Taylor, "Improved regularization of convolutional neural networks with cutout", 2017).
    """

    side: int
    fill: int = 0

    def __post_init__(self) -> None:
        need(self, 0 <= self.side <= 4096, "a side from 0 to 4096 pixels")
        need(self, 0 <= self.fill <= 255, "a fill from 0 to 255")

    def apply(self, images: Images, draws: Draws) -> Images:
        from lockstep.features.images.decode_many import aligned_empty
        from lockstep.features.images.kernels import cut

        height, width = images.shape[1:3]
        out = aligned_empty(images.shape)
        out[:] = images
        half = self.side // 2
        cut(out, draws.below(height, 0) - half, draws.below(width, 1) - half, self.side, self.fill)
        return out


_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Crop, Flip, Rotate, Rotate90, Scale, Colour, Cutout, Mixup)
}


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations on each sample, in order, and the mixup after them."""

    single: tuple[Operation, ...] = ()
    mixup: Mixup | None = None


def parse(words: Sequence[str]) -> Operations:
    """Parse the operations in `words`. Raises ConfigError naming the first invalid one."""
    found = [_operation(word) for word in words]
    for place, operation in enumerate(found):
        if isinstance(operation, Mixup) and place < len(found) - 1:
            raise _wrong(words[place], "mixup as the last operation: it mixes augmented images")
    mixup = found.pop() if found and isinstance(found[-1], Mixup) else None
    return Operations(tuple(found), mixup)


def canonical(words: Sequence[str]) -> tuple[str, ...]:
    """The canonical form of the same operations: with defaults, and numbers as Python prints them."""
    operations = parse(words)
    every: list[Any] = [*operations.single, *filter(None, [operations.mixup])]
    return tuple(":".join([name_of(op), *(str(getattr(op, field.name)) for field in fields(op))]) for op in every)


def forms() -> str:
    """The syntax of each operation with its settings; those in brackets are optional."""
    return ", ".join(_form(name) for name in _KINDS)


def _operation(word: str) -> Any:
    name, *settings = word.split(":")
    kind = _KINDS.get(name)
    if kind is None:
        raise _wrong(word, forms())
    wanted = fields(kind)
    if not sum(field.default is MISSING for field in wanted) <= len(settings) <= len(wanted):
        raise _wrong(word, _form(name))
    return kind(*(_value(word, field, text) for field, text in zip(wanted, settings, strict=False)))


def _value(word: str, field: Field[Any], text: str) -> Any:
    number = _NUMBERS.get(str(field.type))
    if number is None:
        return text
    try:
        return number(text)
    except ValueError:
        raise _wrong(word, f"{field.name} as {'an integer' if number is int else 'a number'}") from None


def _form(name: str) -> str:
    parts = [name]
    for field in fields(_KINDS[name]):
        parts.append(f"[:{field.name}]" if field.default is not MISSING else f":{field.name}")
    return "".join(parts)


def _wrong(word: str, allowed: str) -> ConfigError:
    return ConfigError("--augment is invalid", got=word, allowed=allowed, next_step="Correct --augment.")
