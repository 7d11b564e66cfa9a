"""Decode JPEG, PNG, GIF, TIFF, WebP, BMP and PNM files into 8-bit pixels. The header is checked first.

Pillow decodes. Decision record with the limits and their reasons: docs/decisions/064-image-sources.md.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.choices import MAX_PIXELS
from lockstep.features.images.resize import blend, set_channels

JPEG, PNG, GIF, TIFF, WEBP, BMP, PNM = "JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "PNM"
FORMATS = "JPEG, PNG, GIF, TIFF, WebP, BMP or PNM"
UNKNOWN_FORMAT = "unknown_format"
BROKEN = "broken_image"
TOO_MANY_PIXELS = "too_many_pixels"
ODD_SIDES = "sides_too_unequal"
TOO_DENSE = "expands_too_much"
UNSUPPORTED = "unsupported_pixels"
TOO_LONG = "too_many_bytes"
_MAX_MARKERS = 4096  # walking a header of millions of empty segments would take a minute
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15 without tables and extensions
_BARE = frozenset([0x01, *range(0xD0, 0xD8)])  # markers without a length
_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_PROGRESSIVE = frozenset([0xC2, 0xC6, 0xCA, 0xCE])
_ORIENTATION = 0x0112
_XMP_ORIENTATION = b"tiff:Orientation"
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # sizes of the second header, by version
_PNG_GREY, _PNG_COLOUR = 0, 2  # types of colour that may have a transparent one
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_SMALL_BYTES = 16 << 20  # allowed for a decoded image whatever its file's length: flat pages compress well
_MAX_SCAN_PIXELS = 1 << 30  # pixels times scans of a progressive JPEG: about ten seconds of one core


@dataclass(frozen=True, slots=True)
class Header:
    """Format and sides in pixels (None if only the decoder finds them); the rest is for JPEG only."""

    format: str
    height: int | None = None
    width: int | None = None
    components: int = 0
    progressive: bool = False
    is_described: bool = False
    """Whether EXIF or XMP may say how the picture is turned."""


def format_of(data: bytes) -> str | None:
    """The format by a file's first bytes; None if it is none of these."""
    if data[:3] == b"\xff\xd8\xff":
        return JPEG
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return PNG
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return GIF
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return TIFF
    if data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return BMP
    if data[:1] == b"P" and data[1:2] in b"123456" and data[2:3] in b"\t\n\v\f\r #" and len(data) > 2:
        return PNM
    return WEBP if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def read_header(data: bytes) -> Header | None:
    """Read the header of an image file; None if it has another format or is damaged or cut off."""
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
    """Walk the segments like libjpeg, up to the first scan, skipping bytes between segments."""
    at, described, frame = 2, False, None
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
        elif marker == _APP1:
            segment = data[at + 4 : at + 2 + length]
            described |= segment[:4] == b"Exif" or _XMP_ORIENTATION in segment
        at += 2 + length
    else:
        return None
    if frame is None:
        return None
    marker, height, width, components = frame
    return Header(JPEG, height, width, components, marker in _PROGRESSIVE, described)


class ImageError(Exception):
    """An image that is not decoded; `reason` is one of the constants above, `detail` a text for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits for an image's header. With the defaults, a process that decoded an image of 2^25 pixels took 479 MiB
    (RGB PNG), 543 MiB (RGBA PNG), 571 MiB (RGBA TIFF) and 801 MiB (RGBA WebP).
    """

    max_file_bytes: int = 64 << 20
    """Bytes of the file."""
    max_pixels: int = MAX_PIXELS
    """Height times width."""
    max_sides_ratio: int = 256
    """The longer side over the shorter one."""
    max_expansion: int = 2000
    """Decoded bytes over those of the file; checked if they are more than 16 MiB."""


def decode(data: bytes, channels: int, limits: Limits | None = None) -> NDArray[np.uint8]:
    """Decode one image file: its first frame, turned by the orientation in its EXIF or XMP (as
    PIL.ImageOps.exif_transpose does), 16 bits cut to the upper 8, palettes resolved, transparent parts blended over
    white, and CMYK converted to RGB. Colour profiles are not applied.

    `channels` is 3 (RGB) or 1 (ITU-R 601 luma). Returns (H, W, channels) uint8. Raises ImageError.
    """
    header = checked_header(data, limits or Limits())
    fast = _plain_jpeg(data, header, channels)
    if fast is not None:
        assert header.height is not None and header.width is not None
        # (H * W * channels,) -> (H, W, channels)
        return np.frombuffer(fast, dtype=np.uint8).reshape(header.height, header.width, channels)
    pixels, orientation = _opened(data, header, limits or Limits())
    return set_channels(_upright(pixels, orientation), channels)


def checked_header(data: bytes, limits: Limits) -> Header:
    """The header of an image file, checked against `limits`. Raises ImageError."""
    if len(data) > limits.max_file_bytes:
        raise ImageError(TOO_LONG, f"{len(data)} bytes, {limits.max_file_bytes} at most")
    header = read_header(data)
    if header is None:
        raise ImageError(BROKEN if format_of(data) else UNKNOWN_FORMAT, f"begins with {data[:8].hex(' ')}")
    if header.height is not None and header.width is not None:
        _check_sides(header.height, header.width, len(data), limits)
        # Each scan of a progressive JPEG updates the whole image, and a scan may be as short as a dozen bytes.
        if header.progressive and data.count(b"\xff\xda") * header.height * header.width > _MAX_SCAN_PIXELS:
            raise ImageError(TOO_DENSE, f"{data.count(bytes([0xFF, 0xDA]))} scans")
    return header


def _check_sides(height: int, width: int, file_bytes: int, limits: Limits) -> None:
    if not (height >= 1 and width >= 1):
        raise ImageError(BROKEN, f"{height} x {width}")
    if height * width > limits.max_pixels:
        raise ImageError(TOO_MANY_PIXELS, f"{height} x {width}, {limits.max_pixels} pixels at most")
    if max(height, width) > limits.max_sides_ratio * min(height, width):
        raise ImageError(ODD_SIDES, f"{height} x {width}, {limits.max_sides_ratio} to 1 at most")
    decoded = 3 * height * width
    if decoded > max(_SMALL_BYTES, limits.max_expansion * file_bytes):
        raise ImageError(TOO_DENSE, f"{height} x {width} out of {file_bytes} bytes")


def _plain_jpeg(data: bytes, header: Header, channels: int) -> bytes | None:
    """Decode a grey or three-component JPEG that says nothing of its orientation; None for any other file.

    Calls Pillow's decoder directly: Image.open parses the segments in Python, which takes longer than decoding a small
    image, and for one of 32x32, Image.frombytes and tobytes take a quarter of the time.
    """
    if header.format != JPEG or header.is_described or header.components not in (1, 3):
        return None
    from PIL import Image

    assert header.height is not None and header.width is not None
    mode, wanted = "L" if header.components == 1 else "RGB", "L" if channels == 1 else "RGB"
    size = (header.width, header.height)
    if mode == wanted:
        return decode_plain(mode, size, data)
    try:
        return Image.frombytes(mode, size, data, "jpeg", mode, "").convert(wanted).tobytes()
    except MemoryError:  # this machine's fault, not the file's
        raise
    except Exception as error:
        raise ImageError(BROKEN, _first_line(error)) from None


def decode_plain(mode: str, size: tuple[int, int], data: bytes) -> bytes:
    """The pixels of a JPEG that is upright, of size (width, height), in its own mode L or RGB. Raises ImageError."""
    try:
        return _direct(mode, size, data)
    except MemoryError:  # this machine's fault, not the file's
        raise
    except Exception as error:
        raise ImageError(BROKEN, _first_line(error)) from None


def _direct(mode: str, size: tuple[int, int], data: bytes) -> bytes:
    """The pixels of a JPEG by the C functions below Pillow's Image; Pillow is pinned, since these are not public."""
    from PIL import _imaging

    core: Any = _imaging  # has no type hints
    image, decoder, encoder = core.new(mode, size), core.jpeg_decoder(mode, mode, ""), core.raw_encoder(mode, mode)
    decoder.setimage(image, (0, 0, *size))
    left, error = decoder.decode(data)
    if left >= 0:
        raise ValueError("not enough image data")
    if error:
        raise ValueError("cannot decode image data")
    encoder.setimage(image, (0, 0, *size))
    # A buffer for the whole image: the encoder needs four bytes for each pixel of at least one row.
    _, ended, pixels = encoder.encode(size[0] * max(len(mode) * size[1], 4))
    if ended != 1:
        raise ValueError(f"encoder ended with {ended}")
    return bytes(pixels)


def _opened(data: bytes, header: Header, limits: Limits) -> tuple[NDArray[np.uint8], int]:
    """Decode into (pixels (H, W, 1 or 3) uint8, orientation), by Pillow's class for the format."""
    with warnings.catch_warnings():
        # Pillow warns about odd metadata; only the pixels matter here.
        warnings.simplefilter("ignore")
        try:
            with _open(data, header.format) as image:
                _check_sides(image.height, image.width, len(data), limits)
                if header.format == TIFF:
                    _check_tiles(image, limits)
                image.load()
                # Pillow rotates a TIFF while it loads it.
                orientation = 1 if header.format == TIFF else _orientation(image)
                return _pixels(image, header.format, data), orientation
        except (ImageError, MemoryError):  # lack of memory is this machine's fault, not the file's
            raise
        # A hostile file can make Pillow raise almost any exception; callers quarantine the file with this reason.
        except Exception as error:
            raise ImageError(BROKEN, _first_line(error)) from None


def has_wide_pixels(data: bytes) -> bool:
    """Whether this is a PNG or a grey TIFF of 16 bits a value, of which `decode` keeps the upper 8."""
    kind = format_of(data)
    if kind != TIFF:
        return kind == PNG and data[24:25] == b"\x10"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(_open(data, TIFF).mode).startswith("I;16")
    except MemoryError:
        raise
    except Exception:  # a damaged file, which `decode` refuses with a reason
        return False


def _open(data: bytes, kind: str) -> Any:
    """The image, not yet decoded. By class, because Image.open would also try other formats."""
    from PIL import (
        BmpImagePlugin,
        GifImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    classes: dict[str, Any] = {
        JPEG: JpegImagePlugin.JpegImageFile,
        PNG: PngImagePlugin.PngImageFile,
        GIF: GifImagePlugin.GifImageFile,
        TIFF: TiffImagePlugin.TiffImageFile,
        WEBP: WebPImagePlugin.WebPImageFile,
        BMP: BmpImagePlugin.BmpImageFile,
        PNM: PpmImagePlugin.PpmImageFile,
    }
    return classes[kind](BytesIO(data))


def _check_tiles(image: Any, limits: Limits) -> None:
    width, height = image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_HEIGHT, 1)
    if not (isinstance(width, int) and isinstance(height, int) and 1 <= width * height <= limits.max_pixels):
        raise ImageError(TOO_MANY_PIXELS, f"tiles of {height} x {width}, {limits.max_pixels} pixels at most")


def _orientation(image: Any) -> int:
    try:
        found = image.getexif().get(_ORIENTATION, 1)  # Pillow looks into the XMP, too
        return int(found) if found in range(1, 9) else 1  # also 6.0, as a fraction
    except MemoryError:
        raise
    except Exception:  # Pillow's EXIF parser may raise almost any exception
        return 1  # unreadable EXIF has no orientation; the pixels are still good


def _pixels(image: Any, kind: str, data: bytes) -> NDArray[np.uint8]:
    """The decoded image as (H, W, 1 or 3) uint8."""
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and kind == PNM):  # Pillow scales a PNM's grey to 16 bits
        wide: NDArray[np.uint16] = np.asarray(image).astype(np.uint16)
        grey = (wide >> 8).astype(np.uint8)[:, :, None]
        return np.where((wide == image.info.get("transparency", -1))[:, :, None], np.uint8(255), grey)
    if mode in ("I", "F"):
        raise ImageError(UNSUPPORTED, f"32-bit pixels (mode {mode}) of unknown range")
    if kind == PNG and "transparency" in image.info and data[25] in (_PNG_GREY, _PNG_COLOUR):
        _match_transparent(image, data[24])
    if mode in ("LA", "La"):
        array = np.asarray(image.convert("LA"))
        return blend(array[:, :, :1], array[:, :, 1:])
    if mode in ("RGBA", "RGBa", "PA") or "transparency" in image.info:
        array = np.asarray(image.convert("RGBA"))
        return blend(array[:, :, :3], array[:, :, 3:])
    if mode in ("1", "L"):
        return np.asarray(image.convert("L"))[:, :, None]
    return np.asarray(image.convert("RGB"))


def _match_transparent(image: Any, bits: int) -> None:
    """Bring a PNG's transparent colour to the pixels' 8 bits, which Pillow leaves at the file's `bits`."""
    if bits == 16:
        raise ImageError(UNSUPPORTED, "16-bit colours, of which one is transparent")
    if bits in (2, 4):
        image.info["transparency"] *= 255 // ((1 << bits) - 1)


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rotate and mirror by orientation 1 to 8: (H, W, C) -> (H, W, C), or (W, H, C) for 5 to 8."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::rows, ::columns])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
