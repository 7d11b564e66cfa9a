"""Loops of lockstep.features.images.moves: images (n, H, W, C) uint8 -> out, of the same shape."""

from __future__ import annotations

from typing import Any

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)
ZERO, EDGE, REFLECT = 0, 1, 2


@_kernel
def _inside(at: Any, size: Any, padding: Any) -> Any:
    """The row or column that stands for `at`, -1 for none."""
    if 0 <= at < size:
        return at
    if padding == ZERO:
        return -1
    if padding == EDGE:
        return 0 if at < 0 else size - 1
    return -at if at < 0 else 2 * (size - 1) - at


@_kernel
def crop(images: Any, top: Any, left: Any, padding: Any, out: Any) -> None:
    """out[i, y, x] = images[i, y + top[i], x + left[i]]; `padding` says what lies outside."""
    count, height, width, channels = images.shape
    for i in range(count):
        first = min(max(0, -left[i]), width)
        last = max(first, min(width, width - left[i]))
        for y in range(height):
            row = _inside(y + top[i], height, padding)
            if row < 0:
                out[i, y] = 0
                continue
            for x in range(first, last):
                for c in range(channels):
                    out[i, y, x, c] = images[i, row, x + left[i], c]
            for x in range(first + width - last):
                x += 0 if x < first else last - first  # what lies outside: left of the image, then right of it
                column = _inside(x + left[i], width, padding)
                for c in range(channels):
                    out[i, y, x, c] = 0 if column < 0 else images[i, row, column, c]


@_kernel
def flip(images: Any, rows: Any, columns: Any, out: Any) -> None:
    """Mirror the order of rows, or of columns, of the images whose flag is 1."""
    count, height, width, channels = images.shape
    for i in range(count):
        for y in range(height):
            row = height - 1 - y if rows[i] else y
            if columns[i]:
                for x in range(width):
                    for c in range(channels):
                        out[i, y, x, c] = images[i, row, width - 1 - x, c]
            else:
                out[i, y] = images[i, row]


@_kernel
def turn(images: Any, quarters: Any, out: Any) -> None:
    """Turn square images clockwise by so many quarters."""
    count, size, _, channels = images.shape
    last = size - 1
    for i in range(count):
        for y in range(size):
            for x in range(size):
                row, column = y, x
                if quarters[i] == 1:
                    row, column = last - x, y
                elif quarters[i] == 2:
                    row, column = last - y, last - x
                elif quarters[i] == 3:
                    row, column = x, last - y
                for c in range(channels):
                    out[i, y, x, c] = images[i, row, column, c]


@_kernel
def affine(images: Any, xx: Any, xy: Any, yx: Any, yy: Any, out: Any) -> None:
    """out[i, y, x] = images[i] at the matrix's place for (x, y) about the middle, bilinear by 1/256, 0 outside.

    Places are in half pixels from the middle, which is whole for even and odd sizes; the matrix is in 1/65536.
    """
    count, height, width, channels = images.shape
    for i in range(count):
        for y in range(height):
            v = 2 * y - (height - 1)
            for x in range(width):
                u = 2 * x - (width - 1)
                # 1/131072 of a pixel -> 1/256, rounded half up
                across = (xx[i] * u + xy[i] * v + ((width - 1) << 16) + 256) >> 9
                down = (yx[i] * u + yy[i] * v + ((height - 1) << 16) + 256) >> 9
                column, row, right, below = across >> 8, down >> 8, across & 255, down & 255
                if column < -1 or column >= width or row < -1 or row >= height:
                    for c in range(channels):
                        out[i, y, x, c] = 0
                    continue
                for c in range(channels):
                    total = 32768
                    if row >= 0:
                        if column >= 0:
                            total += (256 - below) * (256 - right) * images[i, row, column, c]
                        if column + 1 < width:
                            total += (256 - below) * right * images[i, row, column + 1, c]
                    if row + 1 < height:
                        if column >= 0:
                            total += below * (256 - right) * images[i, row + 1, column, c]
                        if column + 1 < width:
                            total += below * right * images[i, row + 1, column + 1, c]
                    out[i, y, x, c] = total >> 16
