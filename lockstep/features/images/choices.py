"""The words and numbers that flags for pictures take: what a command line needs of this room, without NumPy."""

from __future__ import annotations

from typing import Literal, get_args

Fit = Literal["resize", "crop", "pad"]
FITS = get_args(Fit)
FIT_WORDS = "resize (default, stretches each side), crop (cuts off both sides alike) or pad (keeps the shape, on black)"
ROTATIONS = (0, 90, 180, 270)
MAX_PIXELS = 1 << 25
"""Height times width of a file; the measurements are at `lockstep.features.images.decode.Limits`."""
