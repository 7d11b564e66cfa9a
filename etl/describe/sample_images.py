"""Some pictures of a dataset, as PNG or in the form in which they are stored: for a page that a person looks at."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.features.schema.fields import Field

MAX_STORED_BYTES = 256 << 10  # a larger picture would make the page heavy
MAX_SIDE = 1024
# What a browser shows as a picture and nothing else: no SVG, which may hold scripts.
_STORED = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF8", "gif"))
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Picture:
    """One picture as a data URL, and the words below it."""

    url: str
    caption: str


def image_field(fields: Sequence[Field]) -> Field | None:
    """The first field that may hold pictures: a uint8 tensor of (height, width) or (height, width, channels), else a
    scalar of bytes.
    """
    for field in fields:
        sides = [size for size in field.shape if size is not None]
        flat = len(sides) == 2 or (len(sides) == 3 and sides[2] in _CHANNELS)
        if field.is_tensor and field.dtype == "uint8" and flat and min(sides[:2]) >= 2 and max(sides[:2]) <= MAX_SIDE:
            return field
    return next((field for field in fields if field.dtype == "bytes" and not field.shape), None)


def pictures(batch: pa.RecordBatch, field: Field, label: str | None, split: str, count: int) -> list[Picture]:
    """Up to `count` pictures of a batch, one from each stretch of it; values that are none are passed over."""
    if count <= 0 or not len(batch):
        return []
    step = max(1, len(batch) // count)
    rows = batch.slice(0, step * count).take(pa.array(range(0, min(len(batch), step * count), step)))
    found = []
    labels = rows.column(label).to_pylist() if label is not None else [None] * len(rows)
    for value, told in zip(rows.column(field.name).to_pylist(), labels, strict=True):
        url = None if value is None else data_url(value, field)
        if url is not None:
            found.append(Picture(url, split if label is None else f"{split}: {told}"))
    return found[:count]


def data_url(value: bytes, field: Field) -> str | None:
    """A value as a data URL, or None for one that is no picture."""
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
    """A PNG file of pixels (height, width, channels) uint8: 1 channel is grey, 3 are red, green, blue, 4 have alpha."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(target, "PNG")
    return target.getvalue()
