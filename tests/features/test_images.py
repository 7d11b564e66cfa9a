"""Resizing by whole numbers: against fractions, and at sizes where the answer can be seen."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from features.images import resize


def exact(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The same definition, slowly and in fractions: (H, W, C) -> (height, width, C)."""
    old_height, old_width, channels = image.shape
    out = np.zeros((height, width, channels), dtype=np.uint8)

    def overlap(i: int, new: int, j: int, old: int) -> Fraction:
        low, high = max(Fraction(i * old, new), Fraction(j)), min(Fraction((i + 1) * old, new), Fraction(j + 1))
        return max(high - low, Fraction(0))

    for i, j, c in np.ndindex(height, width, channels):
        total = sum(
            (overlap(i, height, y, old_height) * overlap(j, width, x, old_width) * int(image[y, x, c]))
            for y in range(old_height)
            for x in range(old_width)
        )
        mean = total * Fraction(height * width, old_height * old_width)
        out[i, j, c] = int(mean + Fraction(1, 2))
    return out


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (2, 2),  # halves meet: .5 is rounded up
        (4, 6),  # unchanged
        (3, 5),  # no common divisor
        (8, 12),  # each pixel four times
        (1, 1),  # the mean of all
        (7, 2),  # up in one direction, down in the other
    ],
)
def test_equals_the_definition(height: int, width: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 2), dtype=np.uint8)
    found = resize(images, height, width)
    assert found.dtype == np.uint8 and found.shape == (3, height, width, 2)
    for image, small in zip(images, found, strict=True):
        np.testing.assert_array_equal(small, exact(image, height, width))


def test_flat_images_stay_flat() -> None:
    for value in (0, 1, 128, 255):
        assert (resize(np.full((1, 28, 28, 1), value, dtype=np.uint8), 13, 31) == value).all()
