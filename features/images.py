"""Image operations that give the same bytes on every machine: exact integer arithmetic only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resize(images: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize by area: each new pixel is the mean of what it covers, rounded half up.

    images (n, H, W, C) uint8 -> (n, height, width, C) uint8. Weights are whole numbers of 1/(height*width) pixels, and
    sums stay below 2^53 for sides up to 4096, so float64 products hold them exactly whatever order BLAS adds in.
    """
    _, old_height, old_width, channels = images.shape
    if (old_height, old_width) == (height, width):
        return images
    rows, columns = _overlaps(old_height, height), _overlaps(old_width, width)
    flat = images.astype(np.float64).reshape(len(images), old_height, old_width * channels)
    tall = np.matmul(rows, flat).reshape(len(images), height, old_width, channels)  # (n, height, W, C)
    # (n, height, W, C) -> (n, height, C, W) @ (W, width) -> (n, height, C, width) -> (n, height, width, C)
    sums = np.matmul(tall.transpose(0, 1, 3, 2), columns.T).transpose(0, 1, 3, 2)
    area = old_height * old_width
    return ((sums.astype(np.int64) * 2 + area) // (2 * area)).astype(np.uint8)


def _overlaps(old: int, new: int) -> NDArray[np.float64]:
    """(new, old) float64, whole: how much of old pixel j lies in new pixel i, in 1/new; rows add up to `old`."""
    starts = np.arange(new)[:, None] * old
    return np.maximum(
        0, np.minimum(starts + old, (np.arange(old) + 1) * new) - np.maximum(starts, np.arange(old) * new)
    ).astype(np.float64)
