"""Decoding: pixels of each format and mode, EXIF turns, and headers that ask for too much."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.features.images import decode as d
from lockstep.features.images.decode import ImageError, Limits, decode, read_header

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREY = PIXELS[:, :, 0]
ALPHA = RNG.integers(0, 256, (6, 9), dtype=np.uint8)
WIDE: np.ndarray = RNG.integers(0, 1 << 16, (6, 9)).astype(np.uint16)


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def over_white(alpha: np.ndarray) -> np.ndarray:
    share = alpha[:, :, None] / 255
    return np.floor(PIXELS * share + 255 * (1 - share) + 0.5).astype(np.uint8)


RGB = Image.fromarray(PIXELS)
RGBA = Image.fromarray(np.dstack([PIXELS, ALPHA]))
PALETTE = RGB.quantize(16)
JPEG = saved(RGB, "JPEG")


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (saved(RGB, "PNG"), PIXELS),
        (saved(RGB, "TIFF"), PIXELS),
        (saved(RGB, "TIFF", compression="tiff_lzw"), PIXELS),
        (saved(RGB, "WEBP", lossless=True), PIXELS),
        (JPEG, np.asarray(Image.open(io.BytesIO(JPEG)))),  # the short way gives what Pillow's own gives
        (saved(RGB.convert("CMYK"), "TIFF"), np.asarray(RGB.convert("CMYK").convert("RGB"))),
        (saved(Image.fromarray(GREY), "PNG"), np.repeat(GREY[:, :, None], 3, 2)),
        (saved(Image.fromarray(WIDE), "PNG"), np.repeat((WIDE >> 8).astype(np.uint8)[:, :, None], 3, 2)),
        (saved(Image.fromarray(WIDE), "TIFF"), np.repeat((WIDE >> 8).astype(np.uint8)[:, :, None], 3, 2)),
        (saved(RGBA, "PNG"), over_white(ALPHA)),
        (saved(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
        (saved(PALETTE, "GIF", save_all=True, append_images=[RGB]), np.asarray(PALETTE.convert("RGB"))),  # first frame
        (saved(Image.fromarray(GREY > 99), "PNG"), np.repeat((GREY > 99)[:, :, None] * np.uint8(255), 3, 2)),
    ],
)
def test_pixels_of_each_format(data: bytes, pixels: np.ndarray) -> None:
    found = decode(data, 3)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, pixels)
    luma = (pixels.astype(np.int64) @ np.array([19595, 38470, 7471]) + 0x8000) >> 16
    np.testing.assert_array_equal(decode(data, 1)[:, :, 0], luma)  # of grey pixels it is themselves


def test_palette_with_a_transparent_colour() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    found = decode(saved(image, "PNG", transparency=0), 3)
    assert found.tolist() == [[[255, 255, 255], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),  # the camera lay on its left: turn clockwise
        (7, lambda a: np.rot90(a, 2).transpose(1, 0, 2)),
        (8, lambda a: np.rot90(a, 1)),
        (99, lambda a: a),  # no orientation at all
    ],
)
def test_orientation(kind: str, orientation: int, upright: Callable[[np.ndarray], np.ndarray]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    more = {"lossless": True} if kind == "WEBP" else {}
    found = decode(saved(RGB, kind, exif=exif, **more), 3)
    np.testing.assert_array_equal(found, upright(decode(saved(RGB, kind, **more), 3)))


def png(height: int, width: int, content: bytes = b"") -> bytes:
    """A PNG of 8-bit grey whose header says what it likes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def tiff_with_tiles(side: int) -> bytes:
    tags = [(256, 4, 8), (257, 4, 8), (258, 3, 8), (259, 3, 5), (262, 3, 1), (322, 4, side), (323, 4, side)]
    tags += [(324, 4, 8), (325, 4, 64)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(80)


SCANS = saved(RGB.resize((1200, 900)), "JPEG", progressive=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", d.UNKNOWN_FORMAT),
        (b"BM" + bytes(60), d.UNKNOWN_FORMAT),
        (saved(RGB, "PNG")[:-40], d.BROKEN),
        (JPEG[: len(JPEG) // 2], d.BROKEN),
        (JPEG[:100], d.BROKEN),  # cut within the header
        (b"\xff\xd8\xff" + b"\xff" * 100_000, d.BROKEN),  # fill bytes without end
        (png(0, 5), d.BROKEN),
        (png(1 << 13, 1 << 13), d.TOO_MANY_PIXELS),
        (png(1 << 30, 1 << 30), d.TOO_MANY_PIXELS),
        (png(1, 1000), d.ODD_SIDES),
        (png(4000, 4000, zlib.compress(bytes(100))), d.TOO_DENSE),
        (tiff_with_tiles(1 << 16), d.TOO_MANY_PIXELS),
        (saved(Image.fromarray(WIDE.astype(np.float32)), "TIFF"), d.UNSUPPORTED),
        (SCANS[:-2] + b"\xff\xda" * 2000 + SCANS[-2:], d.TOO_DENSE),
        (JPEG + bytes(1 << 20), d.TOO_LONG),
    ],
)
def test_what_is_not_decoded(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data, 3, Limits(max_file_bytes=1 << 20))
    assert caught.value.reason == reason


def test_limits_are_the_callers() -> None:
    assert decode(saved(RGB, "PNG"), 3, Limits(max_pixels=54)).shape == (6, 9, 3)
    with pytest.raises(ImageError, match="6 x 9, 53 pixels"):
        decode(saved(RGB, "PNG"), 3, Limits(max_pixels=53))


def test_bytes_between_the_segments_of_a_jpeg_are_skipped() -> None:
    spread = JPEG[:20] + b"\x01\x02\x03" + JPEG[20:]  # behind the first segment
    np.testing.assert_array_equal(decode(spread, 3), decode(JPEG, 3))


EXIF = Image.Exif()
EXIF[0x0112] = 6


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (JPEG, "_imaging.jpeg_decoder"),  # the short way
        (saved(RGB, "PNG"), "ImageFile.ImageFile.load"),
        (saved(RGB, "JPEG", exif=EXIF), "Image.Image.getexif"),
    ],
)
def test_too_little_memory_is_no_fault_of_the_image(data: bytes, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_more: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(f"PIL.{place}", fail)
    with pytest.raises(MemoryError):
        decode(data, 3)


SEEDS = [
    JPEG,
    saved(RGB, "JPEG", exif=EXIF),
    saved(RGB, "JPEG", progressive=True),
    saved(RGBA, "PNG"),
    saved(PALETTE, "GIF"),
    saved(RGB, "TIFF", compression="tiff_lzw"),
    saved(RGB, "WEBP"),
    saved(RGBA, "WEBP", lossless=True),
    saved(RGB, "BMP"),
    saved(PALETTE, "BMP"),
    b"P3 9 6 255\n" + b" ".join(b"%d" % value for value in PIXELS.ravel()),
    b"P6 9 6 200\n" + PIXELS.tobytes(),
]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.sampled_from(SEEDS),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    cut=st.floats(0, 1),
)
def test_damaged_images_end_in_pixels_or_a_reason(seed: bytes, flips: list[tuple[float, int]], cut: float) -> None:
    data = bytearray(seed)
    for place, value in flips:
        data[int(place * len(data))] = value
    damaged = bytes(data[: int(cut * len(data))] if cut < 0.5 else data)
    header = read_header(damaged)
    try:
        found = decode(damaged, 3, Limits(max_pixels=1 << 16))
    except ImageError as error:
        assert error.reason and error.detail
        return
    assert header is not None and found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
