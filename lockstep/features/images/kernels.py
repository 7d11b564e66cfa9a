"""The loop behind lockstep.features.images.resize.resize, compiled: two passes of whole-number sums over the pixels
that overlap.

In a module of its own because numba takes half a second to import, which nobody should pay who resizes nothing.
"""

from __future__ import annotations

import numpy as np

from lockstep.storage.kernels.jit import kernels


# Numba takes its types from the call, arrays of several shapes
@kernels(__name__)
def resize_area(images, out, row, columns, new_h, new_w, first_row):  # type: ignore[no-untyped-def]
    """images (n, H, W * C) uint8 -> out (n, h, w, C) uint8; row (W * C,) int32 is scratch.

    The whole new image has new_h rows and new_w columns; out is its part from first_row on, of the columns given.
    Old pixel j covers [j*new, (j+1)*new) and new pixel i [i*old, (i+1)*old) of a line of old*new parts, so overlaps are
    whole numbers; a row's sums stay below 255*H, which the caller keeps below 2^31, and a pixel's below 255*H*W.
    columns (4, w) int64: the first and last old column under each one of out, and how much of those two lies under it.
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
                # 32 bits, so that a vector unit takes twice as many at once
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
                    # Exact and faster than dividing integers: the quotient is below 256 and, unless it is whole, at
                    # least 1 / (2 * area) away from a whole number, far more than a float64 rounds.
                    out[image, i, j, c] = np.uint8(np.float64(2 * total + area) / double_area)
