"""The loop behind features.images.resize, compiled: two passes of whole-number sums over the pixels that overlap.

In a module of its own because numba takes half a second to import, which nobody should pay who resizes nothing.
"""

from __future__ import annotations

from storage.kernels.jit import kernels


@kernels(__name__)
def resize_area(images, out, row, sums):  # type: ignore[no-untyped-def]
    """images (n, H, W, C) uint8 -> out (n, h, w, C) uint8; row (W * C,) and sums (C,) int64 are scratch.

    Old pixel j covers [j*new, (j+1)*new) and new pixel i [i*old, (i+1)*old) of a line of old*new parts, so overlaps are
    whole numbers; a row's sums stay below 255*H and a pixel's below 255*H*W.
    """
    n, old_h, old_w, channels = images.shape
    new_h, new_w = out.shape[1], out.shape[2]
    area = old_h * old_w
    for image in range(n):
        for i in range(new_h):
            top, bottom = i * old_h, (i + 1) * old_h
            row[:] = 0
            for y in range(top // new_h, (bottom - 1) // new_h + 1):
                weight = min(bottom, (y + 1) * new_h) - max(top, y * new_h)
                for x in range(old_w):
                    for c in range(channels):
                        row[x * channels + c] += weight * images[image, y, x, c]
            for j in range(new_w):
                left, right = j * old_w, (j + 1) * old_w
                sums[:] = 0
                for x in range(left // new_w, (right - 1) // new_w + 1):
                    weight = min(right, (x + 1) * new_w) - max(left, x * new_w)
                    for c in range(channels):
                        sums[c] += weight * row[x * channels + c]
                for c in range(channels):
                    out[image, i, j, c] = (2 * sums[c] + area) // (2 * area)
