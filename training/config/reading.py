"""How ranks read shards, and what they make of the images in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lockstep.features.images.augment import canonical
from lockstep.training.parts import Part

READ_AHEAD_BYTES = 64 << 20
CACHE_BYTES = 16 << 30
BadImages = Literal["refuse", "skip"]
Verify = Literal["start", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingConfig(Part):
    """How shards are read. Raises ConfigError for invalid values."""

    title: ClassVar[str] = "reading (docs/performance.md, docs/batches.md)"

    read_ahead_bytes: int = READ_AHEAD_BYTES
    """The most bytes of shards that a rank fetches ahead."""
    cache: Annotated[str | None, "DIR"] = None
    """A folder on each rank's host that keeps blocks for later epochs and runs (default: none)."""
    cache_bytes: int = CACHE_BYTES
    """The most bytes that the cache of a host keeps, over all runs that use it."""
    verify: Verify = "start"
    """What is verified before the first step: lengths and indexes (start), or every byte of the split (full)."""
    bad_images: BadImages = "refuse"
    """How to treat an image that cannot be decoded: end the run (refuse), or give it weight 0 in training and leave it
    out of validation and evaluation (skip)."""
    augment: Annotated[str, "OP"] = ""
    """Random changes of the training images, such as `crop:4 flip`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "augment", " ".join(canonical(self.augment.split())))
        self.check_choices()
        self.check_count("read_ahead_bytes", "cache_bytes")
        self.check("cache", self.cache is None or self.cache.startswith("/"), "an absolute path on every rank's host")
