"""What an image file says of itself before anything is decoded: format, sides, and for a JPEG how it is coded.

JPEG   FF D8, then segments FF MARKER LENGTH(2, big-endian, counts itself); SOFn: precision, height, width, components
PNG    8 bytes, then the chunk IHDR: width, height (4 bytes each, big-endian)
GIF    "GIF87a" or "GIF89a", width, height of the screen (2 bytes each, little-endian); a frame may be larger
WebP   "RIFF" size "WEBP", then VP8 (14 bits a side), VP8L (14 bits, less 1) or VP8X (24 bits, less 1)
TIFF   "II*" or "MM*" (or "+" for BigTIFF); its sides lie anywhere, so they are asked of the decoder
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

JPEG, PNG, GIF, TIFF, WEBP = "JPEG", "PNG", "GIF", "TIFF", "WEBP"
_MAX_MARKERS = 4096  # a header made of millions of empty segments would cost a minute of looking
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, less tables and extensions
_BARE = frozenset([0x01, *range(0xD0, 0xD8)])  # markers without a length
_SOI, _EOI, _SOS, _EXIF = 0xD8, 0xD9, 0xDA, 0xE1
_PROGRESSIVE = frozenset([0xC2, 0xC6, 0xCA, 0xCE])


@dataclass(frozen=True, slots=True)
class Header:
    """Format and sides in pixels (None where only the decoder can tell); the rest is known of JPEG alone."""

    format: str
    height: int | None = None
    width: int | None = None
    components: int = 0
    progressive: bool = False
    has_exif: bool = False


def format_of(data: bytes) -> str | None:
    """The format that a file begins like; None for none of these."""
    if data[:3] == b"\xff\xd8\xff":
        return JPEG
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return PNG
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return GIF
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return TIFF
    return WEBP if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def read_header(data: bytes) -> Header | None:
    """Read the header of an image file; None where it is none of these formats, or damaged or cut."""
    kind = format_of(data)
    if kind == JPEG:
        return _jpeg(data)
    if kind == WEBP:
        return _webp(data)
    if kind != PNG:
        return None if kind is None else Header(kind)
    if len(data) < 24 or data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return Header(PNG, height, width)


def _webp(data: bytes) -> Header | None:
    if len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
    else:
        return None
    return Header(WEBP, height, width)


def _jpeg(data: bytes) -> Header | None:
    """Walk the segments as libjpeg does, up to the first scan: bytes between segments are skipped."""
    at, exif, frame = 2, False, None
    for _ in range(_MAX_MARKERS):
        at = data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0 or marker in _BARE:
            at += 2
            continue
        if marker == _SOS:
            break
        if marker in (_SOI, _EOI):
            return None
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2:
            return None
        if marker in _FRAMES:
            if length < 8 or at + 10 > len(data) or frame is not None:
                return None
            frame = (marker, *struct.unpack_from(">HHB", data, at + 5))
        elif marker == _EXIF and data[at + 4 : at + 8] == b"Exif":
            exif = True
        at += 2 + length
    else:
        return None
    if frame is None:
        return None
    marker, height, width, components = frame
    return Header(JPEG, height, width, components, marker in _PROGRESSIVE, exif)
