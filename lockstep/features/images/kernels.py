"""Kernels for images: resize by area, the operations of augment.py, and which JPEGs decode without further checks.

They are in a separate module because Numba takes half a second to import; functions import it when they are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.storage.kernels.jit import kernels

# Numba infers the types at each call, of arrays of several shapes.
_kernel = kernels(__name__)
ZERO, EDGE = 0, 1  # and 2: reflect
_MAX_MARKERS = 4096


@_kernel
def resize_area(images, out, row, columns, new_h, new_w, first_row):  # type: ignore[no-untyped-def]
    """Resize images (n, H, W * C) uint8 into out (n, h, w, C) uint8; row (W * C,) int32 is scratch.

    The whole new image has new_h rows and new_w columns; out is its part from first_row on, with the given columns. On
    a line of old*new units, old pixel j covers [j*new, (j+1)*new) and new pixel i covers [i*old, (i+1)*old), so
    overlaps are integers; a row's sums are below 255*H, which the caller keeps below 2^31, a pixel's below 255*H*W.
    columns (4, w) int64: the first and last old column that each column of out covers, and how much of these two.
    """
    n, old_h, line = images.shape
    height, width, channels = out.shape[1], out.shape[2], out.shape[3]
    area = old_h * (line // channels)
    double_area = np.float64(2 * area)
    for image in range(n):
        for i in range(height):
            top, bottom = (first_row + i) * old_h, (first_row + i + 1) * old_h
            row[:] = 0
            for y in range(top // new_h, (bottom - 1) // new_h + 1):
                # 32 bits, so that a vector instruction processes twice as many
                weight = np.int32(min(bottom, (y + 1) * new_h) - max(top, y * new_h))
                source = images[image, y]
                for x in range(line):
                    row[x] += weight * np.int32(source[x])
            for j in range(width):
                first, last = columns[0, j], columns[1, j]
                for c in range(channels):
                    total = columns[2, j] * row[first * channels + c]
                    for x in range(first + 1, last):
                        total += new_w * row[x * channels + c]
                    if last > first:
                        total += columns[3, j] * row[last * channels + c]
                    # Exact, and faster than integer division: the quotient is below 256 and, unless it is an integer,
                    # at least 1 / (2 * area) away from one, far more than the rounding error of float64.
                    out[image, i, j, c] = np.uint8(np.float64(2 * total + area) / double_area)


@_kernel
def _byte(value: Any) -> Any:
    return min(max(value, 0), 255)


@_kernel
def _luma(red: Any, green: Any, blue: Any) -> Any:
    """Compute ITU-R 601 luma, with the weights of lockstep.features.images.resize."""
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


@_kernel
def colour(images: Any, brightness: Any, contrast: Any, saturation: Any, out: Any) -> None:
    """Change brightness, contrast and saturation by factors (n,) in 1/65536; 1 or 3 channels."""
    count, height, width, channels = images.shape
    table = np.empty(256, dtype=np.int64)
    for i in range(count):
        for value in range(256):
            table[value] = _byte((value * brightness[i] + 32768) >> 16)
        if contrast[i] != 65536:
            total = 0
            for y in range(height):
                for x in range(width):
                    pixel = images[i, y, x]
                    if channels == 3:
                        total += _luma(table[pixel[0]], table[pixel[1]], table[pixel[2]])
                    else:
                        total += table[pixel[0]]
            pixels = height * width
            mean = (2 * total + pixels) // (2 * pixels)
            for value in range(256):
                table[value] = _byte(mean + (((table[value] - mean) * contrast[i] + 32768) >> 16))
        factor = saturation[i]
        for y in range(height):
            for x in range(width):
                if channels == 1 or factor == 65536:
                    for c in range(channels):
                        out[i, y, x, c] = table[images[i, y, x, c]]
                else:
                    red, green, blue = table[images[i, y, x, 0]], table[images[i, y, x, 1]], table[images[i, y, x, 2]]
                    grey = _luma(red, green, blue)
                    out[i, y, x, 0] = _byte(grey + (((red - grey) * factor + 32768) >> 16))
                    out[i, y, x, 1] = _byte(grey + (((green - grey) * factor + 32768) >> 16))
                    out[i, y, x, 2] = _byte(grey + (((blue - grey) * factor + 32768) >> 16))


@_kernel
def cut(images: Any, top: Any, left: Any, side: Any, fill: Any) -> None:
    """Fill a square of each image, in place."""
    count, height, width, channels = images.shape
    for i in range(count):
        for y in range(max(0, top[i]), min(height, top[i] + side)):
            for x in range(max(0, left[i]), min(width, left[i] + side)):
                for c in range(channels):
                    images[i, y, x, c] = fill


@_kernel
def mix(images: Any, partners: Any, shares: Any, out: Any) -> None:
    """out[i] = shares[i] / 256 of images[i], the rest of images[partners[i]]; (n, size) each."""
    count, size = images.shape
    for i in range(count):
        mine, other = shares[i], partners[i]
        for at in range(size):
            out[i, at] = (mine * images[i, at] + (256 - mine) * images[other, at] + 128) >> 8


@_kernel
def _inside(at: Any, size: Any, padding: Any) -> Any:
    """The row or column inside the image that pads position `at`, -1 for none."""
    if 0 <= at < size:
        return at
    if padding == ZERO:
        return -1
    if padding == EDGE:
        return 0 if at < 0 else size - 1
    return -at if at < 0 else 2 * (size - 1) - at


@_kernel
def crop(images: Any, top: Any, left: Any, padding: Any, out: Any) -> None:
    """out[i, y, x] = images[i, y + top[i], x + left[i]]; `padding` says how to fill the outside."""
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
                x += 0 if x < first else last - first  # the outside: left of the image, then right of it
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
    """Rotate square images clockwise by so many quarter turns."""
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
    """out[i, y, x] = images[i] where the matrix maps (x, y) about the centre, bilinear in steps of 1/256, 0 outside.

    Positions are in half pixels from the centre, so integers for even and odd sizes; the matrix is in 1/65536.
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


@_kernel
def _may_be_turned(data: Any, at: Any) -> Any:
    """Whether a segment begins with `Exif` or, as XMP does, with `http`."""
    if data[at] == 0x45:
        return data[at + 1] == 0x78 and data[at + 2] == 0x69 and data[at + 3] == 0x66
    return data[at] == 0x68 and data[at + 1] == 0x74 and data[at + 2] == 0x74 and data[at + 3] == 0x70


@_kernel
def _components(data: Any, at: Any, stop: Any, height: Any, width: Any) -> Any:
    """The components, 1 or 3, of a JPEG data[at:stop] of this size without progressive scans, EXIF and XMP; else 0."""
    if stop - at < 4 or data[at] != 0xFF or data[at + 1] != 0xD8 or data[at + 2] != 0xFF:
        return 0
    at += 2
    found = 0
    for _ in range(_MAX_MARKERS):
        while at < stop and data[at] != 0xFF:
            at += 1
        if at + 4 > stop:
            return 0
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0 or marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        if marker == 0xDA:
            return found
        if marker == 0xD8 or marker == 0xD9:
            return 0
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2:
            return 0
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            if length < 8 or at + 10 > stop or found or marker > 0xC1:
                return 0
            tall, wide = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            found = data[at + 9]
            if tall != height or wide != width or (found != 1 and found != 3):
                return 0
        elif marker == 0xE1 and at + 8 <= stop and _may_be_turned(data, at + 4):
            return 0
        at += 2 + length
    return 0


@_kernel
def plain_components(data: Any, offsets: Any, height: Any, width: Any, out: Any) -> None:
    """out[i] (int64) = _components of the file data[offsets[i]:offsets[i + 1]] (uint8)."""
    for i in range(len(out)):
        out[i] = _components(data, offsets[i], offsets[i + 1], height, width)
