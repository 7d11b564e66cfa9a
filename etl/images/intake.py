"""What is done to each image on its way in: decode, turn, bring to one size and number of channels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.decode import Limits, checked_header, decode
from lockstep.features.images.resize import fit, rotate, set_channels

_MAX_GROWTH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """The operations, in this order: decode and EXIF orientation, channels, `degrees` clockwise, `how` to `size`.

    `size` is (height, width), None for the size that images have; `channels` 1 or 3, None for what they have;
    `keep` leaves encoded images as they are once they are known to decode; `late` leaves those to the task that writes
    them that are shorter than their pixels.
    """

    size: tuple[int, int] | None
    channels: int | None
    how: str = "resize"
    degrees: int = 0
    keep: bool = False
    late: bool = False
    limits: Limits = field(default_factory=Limits)

    def shape(self, height: int, width: int, channels: int) -> tuple[int, int, int]:
        """(height, width, channels) of what becomes of an image."""
        turned = (width, height) if self.degrees in (90, 270) else (height, width)
        return (*(self.size or turned), self.channels or channels)

    def stack(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Images of one size, decoded already: (n, H, W, C) uint8 -> (n, *shape) uint8."""
        if self.channels is not None:
            images = set_channels(images, self.channels)
        images = rotate(images, self.degrees)
        return images if self.size is None else fit(images, *self.size, self.how)

    def hand_on(self, data: bytes) -> tuple[bytes, bool]:
        """An encoded image in the form in which it travels, and whether that is `data`, to be taken later. Raises
        ImageError where its header or, if it is taken now, all of it is not what it should be.
        """
        if self.late and self.size is not None:
            assert self.channels is not None
            pixels = self.size[0] * self.size[1] * self.channels
            header = checked_header(data, self.limits)
            # A large picture is made small here: few tasks write, and each would decode for a long time.
            sides = (header.height or self.limits.max_pixels) * (header.width or 1)
            if len(data) < pixels and sides * self.channels <= _MAX_GROWTH * pixels:
                return data, True
        return self.take(data), False

    def take(self, data: bytes) -> bytes:
        """An encoded image: its pixels in C order, or `data` itself where it is kept. Raises ImageError."""
        assert self.channels is not None
        pixels = decode(data, self.channels, self.limits)
        if self.keep:
            return data
        if not self.degrees and pixels.shape[:2] == self.size:
            return pixels.tobytes()
        return self.stack(pixels[None]).tobytes()
