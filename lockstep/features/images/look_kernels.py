"""Loops of lockstep.features.images.looks and mixup: images (n, H, W, C) uint8 -> out, of the same shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)


@_kernel
def _byte(value: Any) -> Any:
    return min(max(value, 0), 255)


@_kernel
def _luma(red: Any, green: Any, blue: Any) -> Any:
    """ITU-R 601, as lockstep.features.images.resize weighs it."""
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


@_kernel
def colour(images: Any, brightness: Any, contrast: Any, saturation: Any, out: Any) -> None:
    """Brightness, contrast and saturation by factors (n,) in 1/65536; 1 or 3 channels."""
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
