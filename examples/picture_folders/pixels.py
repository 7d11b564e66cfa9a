"""The pixels that `lockstep etl_images --store pixels` makes of a picture file, in Pillow and NumPy alone: for programs
that give files to an exported model. Not for 16 bits a channel, of which the dataset keeps the upper 8.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image, ImageOps


def pixels_of(file: Any, height: int, width: int, channels: int = 3, fit: str = "resize") -> np.ndarray:
    """Return a picture as (height, width, channels) uint8, as etl_images with this --fit and --channels stores it."""
    with Image.open(file) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGBA")  # turned as the camera was held
    rgba = np.asarray(picture, np.int64)
    colours, opacity = rgba[..., :3], rgba[..., 3:]
    over_white = (colours * opacity + 255 * (255 - opacity) + 127) // 255
    mode = Image.fromarray(over_white.astype(np.uint8)).convert("RGB" if channels == 3 else "L")
    whole = np.asarray(mode, np.int64).reshape(*rgba.shape[:2], channels)

    tall, wide = height, width  # resize: each side by itself
    if fit != "resize":  # one scale for both sides: crop covers the new size, pad stays within it
        scales = Fraction(height, len(whole)), Fraction(width, whole.shape[1])
        scale = max(scales) if fit == "crop" else min(scales)
        tall, wide = (max(1, int(scale * side + Fraction(1, 2))) for side in whole.shape[:2])
    scaled = _area(_area(whole, tall, 0), wide, 1)
    area = whole.shape[0] * whole.shape[1]
    scaled = (2 * scaled + area) // (2 * area)  # the mean, rounded half up

    top, left = abs(tall - height) // 2, abs(wide - width) // 2
    if fit == "crop":
        return scaled[top : top + height, left : left + width].astype(np.uint8)
    black = np.zeros((height, width, channels), np.uint8)
    black[top : top + tall, left : left + wide] = scaled
    return black


def _area(values: np.ndarray, new: int, axis: int) -> np.ndarray:
    """Sum `values` along an axis for `new` pixels, each of which covers the same share of the old ones."""
    old = values.shape[axis]
    starts, edges = np.arange(new)[:, None] * old, np.arange(old)[None] * new
    covered = np.minimum(starts + old, edges + new) - np.maximum(starts, edges)  # of a line of old * new units
    return np.moveaxis(np.tensordot(np.maximum(covered, 0), values, (1, axis)), 0, axis)
