"""Image operations with the same bytes on every machine: exact integer arithmetic only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.choices import FITS, ROTATIONS
from lockstep.storage.errors import ConfigError, DataError, require

# ITU-R 601 luma in 1/65536, with Pillow's weights
_LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)
_BLOCK_PIXELS = 1 << 16  # at a time, so that the 32-bit sums take little memory compared with a large image


def resize(images: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize by area: each new pixel is the mean of the area that it covers, rounded half up.

    images (n, H, W, C) uint8, H below 2^23 -> (n, height, width, C) uint8.
    """
    if images.shape[1:3] == (height, width):
        return images
    return resized_part(images, (height, width), (height, width))


def resized_part(images: NDArray[np.uint8], whole: tuple[int, int], part: tuple[int, int]) -> NDArray[np.uint8]:
    """The middle `part` of the images resized to `whole` (height, width): (n, H, W, C) uint8 -> (n, *part, C) uint8.

    Computes only the part: a line of pixels scaled to cover an image would take gigabytes.
    """
    n, old_height, old_width, channels = images.shape
    if old_height >= 1 << 23:
        raise DataError(
            "an image is too high to be resized: its sums would exceed 32 bits",
            got=f"{old_height} rows of pixels",
            allowed=f"fewer than {1 << 23}",
            next_step="Cut the image into parts.",
        )
    from lockstep.features.images.kernels import resize_area

    (tall, wide), (height, width) = whole, part
    out = np.empty((n, height, width, channels), dtype=np.uint8)
    row, columns = np.empty(old_width * channels, dtype=np.int32), _columns(old_width, wide, (wide - width) // 2, width)
    # Pixels from a decoder may be read-only, for which Numba would compile the loop once more.
    lines = np.require(images, requirements=["C", "W"]).reshape(n, old_height, old_width * channels)
    resize_area(lines, out, row, columns, tall, wide, (tall - height) // 2)
    return out


def _columns(old: int, new: int, start: int, count: int) -> NDArray[np.int64]:
    """Return (4, count): for `count` new columns from `start` on, the first and last old column that each covers, and
    how much of these two it covers, in 1/new.
    """
    left = np.arange(start, start + count, dtype=np.int64) * old
    first, last = left // new, (left + old - 1) // new
    return np.stack([first, last, np.minimum(left + old, (first + 1) * new) - left, left + old - last * new])


def fit(images: NDArray[np.uint8], height: int, width: int, how: str) -> NDArray[np.uint8]:
    """Bring images to one size: (n, H, W, C) uint8 -> (n, height, width, C) uint8.

    `resize` stretches each side separately. `crop` keeps the aspect ratio, covers the whole new image and cuts off the
    same on both sides. `pad` keeps the ratio, too, shows the whole old image and leaves the rest zero. An odd row or
    column is at the bottom or right. Raises ConfigError for another `how`.
    """
    require(how in FITS, "--fit", how, ", ".join(FITS), "Correct --fit.")
    old_height, old_width = images.shape[1:3]
    if how == "resize" or (old_height, old_width) == (height, width):
        return resize(images, height, width)
    tall, wide = scaled_size(old_height, old_width, height, width, cover=how == "crop")
    if how == "crop":
        return resized_part(images, (tall, wide), (height, width))
    top, left = (height - tall) // 2, (width - wide) // 2
    out = np.zeros((len(images), height, width, images.shape[3]), dtype=np.uint8)
    out[:, top : top + tall, left : left + wide] = resize(images, tall, wide)
    return out


def scaled_size(old_height: int, old_width: int, height: int, width: int, *, cover: bool) -> tuple[int, int]:
    """The size of a scaled image: one side as given, the other in proportion, rounded half up."""
    if (height * old_width >= width * old_height) == cover:
        by_height = (2 * old_width * height + old_height) // (2 * old_height)
        return height, max(by_height, width) if cover else min(max(by_height, 1), width)
    by_width = (2 * old_height * width + old_width) // (2 * old_width)
    return max(by_width, height) if cover else min(max(by_width, 1), height), width


def rotate(images: NDArray[np.uint8], degrees: int) -> NDArray[np.uint8]:
    """Rotate clockwise by 0, 90, 180 or 270 degrees: (n, H, W, C) -> (n, H, W, C) or (n, W, H, C)."""
    if degrees not in ROTATIONS:
        raise ConfigError(
            "images cannot be rotated by this angle",
            got=f"{degrees} degrees",
            allowed=", ".join(map(str, ROTATIONS)),
            next_step="Correct --rotate.",
        )
    return np.rot90(images, k=-degrees // 90, axes=(1, 2)) if degrees else images


def blend(pixels: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blend pixels (H, W, C) of opacity (H, W, 1) over white, rounded half up: (H, W, C) uint8."""
    height, width, channels = pixels.shape
    out = np.empty((height, width, channels), dtype=np.uint8)
    rows = max(1, _BLOCK_PIXELS // max(1, width))
    for top in range(0, height, rows):
        wide, over = pixels[top : top + rows].astype(np.uint32), alpha[top : top + rows].astype(np.uint32)
        out[top : top + rows] = (wide * over + 255 * (255 - over) + 127) // 255
    return out


def set_channels(pixels: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Grey to RGB by repetition, RGB to grey by ITU-R 601 luma: (..., 1 or 3) uint8 -> (..., channels) uint8."""
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=-1)
    flat = pixels.reshape(-1, 3)
    out = np.empty(len(flat), dtype=np.uint8)
    for start in range(0, len(flat), _BLOCK_PIXELS):
        block = slice(start, start + _BLOCK_PIXELS)
        out[block] = (flat[block].astype(np.uint32) @ _LUMA + 0x8000) >> 16
    return out.reshape(*pixels.shape[:-1], 1)
