"""Pictures of a dataset for a page: which field holds them, and a value of it as a data URL."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.features.schema.fields import Field

MAX_STORED_BYTES = 256 << 10  # larger pictures would make the page too large
MAX_SIDE = 1024
# Formats that a browser shows as pictures only: no SVG, which may hold scripts.
_STORED = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"))
_CHANNELS = (1, 3, 4)


def image_field(fields: Sequence[Field]) -> Field | None:
    """The first field that may hold pictures: a uint8 tensor (height, width) or (height, width, channels), else a
    scalar of bytes.
    """
    for field in fields:
        sides = [size for size in field.shape if size is not None]
        flat = len(sides) == 2 or (len(sides) == 3 and sides[2] in _CHANNELS)
        if field.is_tensor and field.dtype == "uint8" and flat and min(sides[:2]) >= 2 and max(sides[:2]) <= MAX_SIDE:
            return field
    return next((field for field in fields if field.dtype == "bytes" and not field.shape), None)


def data_url(value: bytes, field: Field) -> str | None:
    """A value as a data URL, None if it is no picture."""
    if field.is_tensor:
        sides = [size for size in field.shape if size is not None]
        pixels = np.frombuffer(value, np.uint8).reshape(sides[0], sides[1], -1)
        return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode('ascii')}"
    kind = next((name for magic, name in _STORED if value.startswith(magic)), None)
    if value[:4] == b"RIFF" and value[8:12] == b"WEBP":
        kind = "webp"
    if kind is None or len(value) > MAX_STORED_BYTES:
        return None
    return f"data:image/{kind};base64,{base64.b64encode(value).decode('ascii')}"


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of pixels (height, width, channels) uint8; channels 1 grey, 3 RGB, 4 RGBA."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(target, "PNG")
    return target.getvalue()
