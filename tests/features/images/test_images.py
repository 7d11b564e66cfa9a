"""Image operations by whole numbers: against fractions, and at sizes where the answer can be seen."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.features.images.choices import FITS
from lockstep.features.images.resize import blend, fit, resize, rotate, scaled_size, set_channels
from lockstep.storage.errors import ConfigError


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


def test_sides_beyond_exact_floats() -> None:
    flat = np.full((1, 5000, 6000, 1), 255, dtype=np.uint8)
    assert (resize(flat, 7, 11) == 255).all()


@pytest.mark.parametrize(
    ("old", "new", "scaled", "how"),
    [
        ((4, 8), (4, 4), (4, 8), "crop"),  # as tall as wanted already: two columns go on each side
        ((4, 8), (2, 2), (2, 4), "crop"),
        ((5, 3), (4, 4), (7, 4), "crop"),  # 20/3 rows are rounded to 7; the odd row goes at the bottom
        ((4, 8), (4, 4), (2, 4), "pad"),
        ((3, 3), (4, 7), (4, 4), "pad"),  # the odd column stands on the right
        ((1, 256), (2, 2), (1, 2), "pad"),  # never less than one row
        ((3, 5), (6, 10), (6, 10), "pad"),  # the same ratio: nothing to pad
    ],
)
def test_crop_and_pad(old: tuple[int, int], new: tuple[int, int], scaled: tuple[int, int], how: str) -> None:
    image = np.random.default_rng(1).integers(1, 256, (1, *old, 3), dtype=np.uint8)
    found, whole = fit(image, *new, how), resize(image, *scaled)
    top, left = abs(scaled[0] - new[0]) // 2, abs(scaled[1] - new[1]) // 2
    assert found.shape == (1, *new, 3)
    if how == "crop":
        np.testing.assert_array_equal(found, whole[:, top : top + new[0], left : left + new[1]])
        return
    inner = (slice(None), slice(top, top + scaled[0]), slice(left, left + scaled[1]))
    np.testing.assert_array_equal(found[inner], whole)
    found[inner] = 0
    assert not found.any()


@given(*[st.integers(1, 40)] * 4, st.sampled_from([1, 3]))
def test_a_crop_is_the_middle_of_the_whole(height: int, width: int, tall: int, wide: int, channels: int) -> None:
    image = np.random.default_rng(height).integers(0, 256, (2, height, width, channels), dtype=np.uint8)
    scaled = scaled_size(height, width, tall, wide, cover=True)
    top, left = (scaled[0] - tall) // 2, (scaled[1] - wide) // 2
    whole = resize(image, *scaled)
    np.testing.assert_array_equal(fit(image, tall, wide, "crop"), whole[:, top : top + tall, left : left + wide])


@pytest.mark.parametrize("sides", [(256, 1), (1, 256)])
def test_a_crop_of_a_line_takes_what_its_result_takes(sides: tuple[int, int]) -> None:
    """The whole of it, scaled, would take 200 MB."""
    image = np.full((1, *sides, 3), 9, dtype=np.uint8)
    fit(image, 2, 2, "crop")  # the loop is compiled
    tracemalloc.start()
    found = fit(image, 512, 512, "crop")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found == 9).all() and peak_bytes < 2 * found.nbytes


@given(*[st.integers(1, 40)] * 4, st.sampled_from(FITS))
def test_any_size_is_reached(height: int, width: int, tall: int, wide: int, how: str) -> None:
    image = np.full((2, height, width, 1), 77, dtype=np.uint8)
    found = fit(image, tall, wide, how)
    assert found.shape == (2, tall, wide, 1)
    assert set(np.unique(found)) <= {0, 77} and (how == "pad" or (found == 77).all())


def test_another_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fit"):
        fit(np.zeros((1, 2, 2, 1), dtype=np.uint8), 3, 3, "stretch")


def test_turns_are_clockwise() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3, 1)
    assert rotate(image, 90)[0, :, :, 0].tolist() == [[3, 0], [4, 1], [5, 2]]
    np.testing.assert_array_equal(rotate(rotate(image, 90), 270), image)
    np.testing.assert_array_equal(rotate(image, 180), image[:, ::-1, ::-1])


@pytest.mark.parametrize(
    "sides", [(1, 1), (3, 70_000), (400, 331), (70_000, 1)]
)  # less than a block, and no whole ones
def test_large_images_are_blended_and_made_grey_as_a_whole_is(sides: tuple[int, int]) -> None:
    random = np.random.default_rng(3)
    rgba = random.integers(0, 256, (*sides, 4), dtype=np.uint8)
    pixels, alpha = rgba[:, :, :3], rgba[:, :, 3:]
    wide, over = pixels.astype(np.uint32), alpha.astype(np.uint32)
    np.testing.assert_array_equal(blend(pixels, alpha), (wide * over + 255 * (255 - over) + 127) // 255)
    grey = (wide @ np.array([19595, 38470, 7471], np.uint32) + 0x8000) >> 16
    np.testing.assert_array_equal(set_channels(pixels, 1), grey[..., None])


def test_blending_a_large_image_takes_little_beside_it() -> None:
    tracemalloc.start()
    set_channels(np.broadcast_to(np.uint8(7), (1 << 11, 1 << 10, 3)).copy(), 1)
    blend(np.zeros((1 << 11, 1 << 10, 3), np.uint8), np.zeros((1 << 11, 1 << 10, 1), np.uint8))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 10 * (1 << 21), "seven bytes a pixel of images and result, and a block"
