"""The headers of many JPEG files in one loop: which of them Pillow's decoder can be given as they are.

lockstep.features.images.image_header reads one header and says what the bytes mean; this follows it step by step.
"""

from __future__ import annotations

from typing import Any

from lockstep.storage.kernels.jit import kernels

_kernel = kernels(__name__)
_MAX_MARKERS = 4096


@_kernel
def _is_exif(data: Any, at: Any) -> Any:
    return data[at] == 0x45 and data[at + 1] == 0x78 and data[at + 2] == 0x69 and data[at + 3] == 0x66


@_kernel
def _components(data: Any, at: Any, stop: Any, height: Any, width: Any) -> Any:
    """1 or 3 for a JPEG data[at:stop] of these sides that is neither progressive nor has EXIF, else 0."""
    if stop - at < 4 or data[at] != 0xFF or data[at + 1] != 0xD8 or data[at + 2] != 0xFF:
        return 0
    at += 2
    found = 0
    for _ in range(_MAX_MARKERS):
        while at < stop and data[at] != 0xFF:
            at += 1
        if at + 4 > stop:
            return 0
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0 or marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        if marker == 0xDA:
            return found
        if marker == 0xD8 or marker == 0xD9:
            return 0
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2:
            return 0
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            if length < 8 or at + 10 > stop or found or marker > 0xC1:
                return 0
            tall, wide = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            found = data[at + 9]
            if tall != height or wide != width or (found != 1 and found != 3):
                return 0
        elif marker == 0xE1 and at + 8 <= stop and _is_exif(data, at + 4):
            return 0
        at += 2 + length
    return 0


@_kernel
def plain_components(data: Any, offsets: Any, height: Any, width: Any, out: Any) -> None:
    """out[i] (int64) for the file data[offsets[i]:offsets[i + 1]] (uint8)."""
    for i in range(len(out)):
        out[i] = _components(data, offsets[i], offsets[i + 1], height, width)
