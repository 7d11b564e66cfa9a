"""A look at some images before the job: 16-bit files may use so few of their bits that the pixels are almost black."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.etl.images.source import Piece
from lockstep.features.images.decode import decode, has_wide_pixels
from lockstep.features.images.intake import Intake

log = logging.getLogger(__name__)
_PIECES, _IMAGES = 4, 4  # images of each piece; on HDFS, opening a file takes some milliseconds
_DARK = 15  # the upper 8 of 12 bits


class _Enough(Exception):
    """All images that are looked at in a piece were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look(Intake):
    """Takes the first images of a piece, and keeps the brightest pixel of each that has 16 bits a value."""

    seen: list[int | None] = field(default_factory=list)

    def hand_on(self, data: bytes) -> tuple[bytes, bool]:
        """Raises _Enough after the last image, and what decode raises."""
        self.seen.append(int(decode(data, 1, self.limits).max()) if has_wide_pixels(data) else None)
        if len(self.seen) == _IMAGES:
            raise _Enough
        return b"", True


def log_dark(pieces: Sequence[Piece], intake: Intake) -> None:
    """Report 16-bit images that hold 12 bits or fewer, if all are so that a look at a few pieces finds."""
    peaks: list[int] = []
    for number in sorted({len(pieces) * part // _PIECES for part in range(_PIECES)}):
        look = _Look(size=intake.size, channels=intake.channels, limits=intake.limits)
        with suppress(_Enough):
            next(pieces[number].read(look, None), None)  # one batch at most, if images are rare
        peaks += [peak for peak in look.seen if peak is not None]
    if peaks and max(peaks) <= _DARK:
        log.warning(
            "16-bit images use %d of their 16 bits at most (%d images were looked at): pixels keep the upper 8 bits, so"
            " none is brighter than %d of 255; shift the values to the upper bits before",
            8 + max(peaks).bit_length(),
            len(peaks),
            max(peaks),
        )
