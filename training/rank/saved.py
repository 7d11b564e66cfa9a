"""What a rank knows of a checkpoint once it is committed. No Keras."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is committed."""

    step: int
    bytes: int
    """Of this rank's file."""
    written_s: float
    """How long hash, upload and commit took beside it."""
