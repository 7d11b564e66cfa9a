"""How a picture file becomes a sample: which files count as pictures, and the operations on each, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.choices import FITS
from lockstep.features.images.decode import Limits, checked_header, decode
from lockstep.features.images.resize import fit, rotate, set_channels
from lockstep.storage import documents

IMAGE = "image"  # the field of pixels

_TEXTS = ("txt", "md", "csv", "tsv", "json", "jsonl", "xml", "html", "yaml", "yml", "toml", "ini", "log", "py", "sh")
_SIDE = ("__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini")
_OTHERS = frozenset((*_TEXTS, "pdf", "mat", "npy", "npz", "pkl", "bin", "db", "gz", "zip", "tar", "mp4", "avi"))
_MAX_GROWTH = 4


def is_left_out(parts: Sequence[str]) -> bool:
    """Whether a name is not that of an image: hidden, another type (.txt, .csv, ...), a system's side file."""
    if parts[-1].startswith(".") or parts[-1] in _SIDE or _is_hidden(tuple(parts[:-1])):
        return True
    stem, dot, suffix = parts[-1].rpartition(".")
    return bool(stem and dot) and suffix.lower() in _OTHERS


@lru_cache(maxsize=1 << 12)
def _is_hidden(folders: tuple[str, ...]) -> bool:
    return any(folder.startswith(".") or folder in _SIDE for folder in folders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """The operations on an image, in this order: decode with EXIF orientation, channels, rotation by `degrees`
    clockwise, `how` to `size`.

    `size` is (height, width), None to keep the images' size; `channels` is 1 or 3, None to keep theirs; with `keep`
    encoded images stay files, after a check that they decode; with `late` the task that writes an image decodes it if
    its file is smaller than its pixels.
    """

    size: tuple[int, int] | None
    channels: int | None
    how: str = "resize"
    degrees: int = 0
    keep: bool = False
    late: bool = False
    limits: Limits = field(default_factory=Limits)

    def shape(self, height: int, width: int, channels: int) -> tuple[int, int, int]:
        """(height, width, channels) of an image after all operations."""
        turned = (width, height) if self.degrees in (90, 270) else (height, width)
        return (*(self.size or turned), self.channels or channels)

    def stack(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Images of one size, decoded already: (n, H, W, C) uint8 -> (n, *shape) uint8."""
        if self.channels is not None:
            images = set_channels(images, self.channels)
        images = rotate(images, self.degrees)
        return images if self.size is None else fit(images, *self.size, self.how)

    def hand_on(self, data: bytes) -> tuple[bytes, bool]:
        """An encoded image in the form in which it is shuffled, and whether that is still `data`. Raises ImageError if
        its header, or if it is decoded now its content, is not valid.
        """
        if self.late and self.size is not None:
            assert self.channels is not None
            pixels = self.size[0] * self.size[1] * self.channels
            header = checked_header(data, self.limits)
            # Large pictures are resized here: few tasks write, and each would take long to decode them.
            sides = (header.height or self.limits.max_pixels) * (header.width or 1)
            if len(data) < pixels and sides * self.channels <= _MAX_GROWTH * pixels:
                return data, True
        return self.take(data), False

    def take(self, data: bytes) -> bytes:
        """The pixels of an encoded image in C order, or with `keep` `data` itself. Raises ImageError."""
        assert self.channels is not None
        pixels = decode(data, self.channels, self.limits)
        if self.keep:
            return data
        if not self.degrees and pixels.shape[:2] == self.size:
            return pixels.tobytes()
        return self.stack(pixels[None]).tobytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """How pictures became the pixels of a dataset; an exported model keeps it for pictures that it is given later."""

    height: int
    width: int
    channels: int
    fit: str
    rotate: int
    max_pixels: int

    @classmethod
    def of(cls, created: Mapping[str, Any], shapes: Mapping[str, tuple[int | None, ...]]) -> Pixels | None:
        """Return how a dataset's pixels were made, by what its manifest says of its job, and the shapes of its fields;
        None if that job made no pixels.
        """
        if created.get("job") != "etl_images" or created.get("store") != "pixels":
            return None
        shape = dict(zip(("height", "width", "channels"), shapes.get(IMAGE, ()), strict=False))
        own = {name: created.get(name) for name in ("fit", "rotate", "max_pixels")}
        return cls.from_json({**shape, **own}, "created_by.config")

    @classmethod
    def from_json(cls, document: object, where: str) -> Pixels:
        """Read what `to_json` made. Raises DataError naming `where`."""
        doc = documents.obj(document, [item.name for item in fields(cls)], where=where)
        how = documents.string(doc.pop("fit"), where=where, choices=FITS)
        return cls(fit=how, **{name: documents.count(value, where=where) for name, value in doc.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @property
    def intake(self) -> Intake:
        """The operations on each picture."""
        return Intake(
            size=(self.height, self.width),
            channels=self.channels,
            how=self.fit,
            degrees=self.rotate,
            limits=Limits(max_pixels=self.max_pixels),
        )
