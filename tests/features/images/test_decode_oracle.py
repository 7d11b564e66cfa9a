"""300 generated files of every format, depth and kind of metadata: pixels are those of Pillow, or the file is refused.

Pillow's are Image.open, exif_transpose, then over white what is transparent. Where Pillow itself is wrong about a
transparent colour (grey of 1, 2, 4 and 16 bits) and where it clips 16 bits, the pixels before encoding are the oracle.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from lockstep.features.images.decode import ImageError, decode
from lockstep.features.images.decode_many import decode_files

FILES = 300
ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description {0}/></rdf:RDF></x:xmpmeta>'
MODES = {
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "GIF": ("L", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "PPM": ("1", "L", "RGB", "I;16"),
}
TURNED = ("JPEG", "PNG", "WEBP", "TIFF")


def drawn(mode: str, draw: random.Random) -> Image.Image:
    """A picture of random pixels in this mode; half of the palettes and alphas have transparent parts."""
    rng = np.random.default_rng(draw.getrandbits(32))
    height, width = draw.randint(1, 20), draw.randint(1, 20)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << draw.choice([12, 16]), (height, width)).astype(np.uint16))
    if mode in ("I", "F"):
        return Image.fromarray(
            rng.integers(0, 1 << 20, (height, width)).astype(np.int32 if mode == "I" else np.float32)
        )
    rgb = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    if mode == "P":
        return rgb.quantize(draw.choice([2, 16, 200]))
    image = rgb.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)))
    return image


def made(draw: random.Random) -> tuple[str, bytes, np.ndarray | None]:
    """What the file is, its bytes, and its pixels (H, W) before any turn where Pillow does not give them."""
    kind = draw.choice(list(MODES))
    mode = draw.choice(MODES[kind])
    image, more, what = drawn(mode, draw), dict[str, object](), [kind, mode]
    if kind in TURNED:
        turn, exif = draw.randint(0, 9), Image.Exif()
        if draw.random() < 0.6:
            exif[0x0112] = turn
            what.append("exif")
        else:
            exif[0x010E] = "a picture"
        if draw.random() < 0.6:
            more["exif"] = exif
        if draw.random() < 0.5:
            tag = draw.choice(['tiff:Orientation="{}"', "tiff:Orientation>{}<", 'xmp:Rating="{}"'])
            xmp, info = XMP.format(tag.format(draw.randint(0, 9))), PngImagePlugin.PngInfo()
            info.add_itxt("XML:com.adobe.xmp", xmp)
            more |= {"pnginfo": info} if kind == "PNG" else {"xmp": xmp.encode()}
            what.append("xmp")
        if draw.random() < 0.2:
            more["icc_profile"] = ICC
    if kind == "JPEG":
        more |= {"quality": draw.choice([30, 95]), "progressive": draw.random() < 0.3, "optimize": draw.random() < 0.3}
    if kind == "WEBP":
        more["lossless"] = draw.random() < 0.5
    if kind == "TIFF" and mode in ("L", "RGB", "RGBA"):
        more["compression"] = draw.choice(["raw", "tiff_lzw", "tiff_deflate", "packbits"])
    if kind in ("GIF", "PNG", "WEBP", "TIFF") and mode != "I;16" and draw.random() < 0.3:
        more |= {"save_all": True, "append_images": [drawn(mode, draw).resize(image.size)], "duration": 40}
        what.append("animated")
    keyed = (kind == "PNG" and mode in ("1", "L", "RGB", "P", "I;16")) or (kind == "GIF" and mode == "P")
    if keyed and "animated" not in what and draw.random() < 0.5:
        more["transparency"] = image.getpixel((0, 0))
        what.append("tRNS")
    file = io.BytesIO()
    image.save(file, kind, **more)
    data = file.getvalue()
    wide = None
    if mode == "I;16":
        pixels = np.asarray(image)
        wide = (pixels >> 8).astype(np.uint8)
        if "transparency" in more:
            wide = np.where(pixels == more["transparency"], 255, wide)
    if draw.random() < 0.1:
        data = data[: draw.randrange(len(data))]
        what.append("cut")
    return " ".join(what), data, wide


def of_pillow(data: bytes) -> np.ndarray:
    """(H, W, 3) uint8: opened, turned, over white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return np.asarray(white)
    return np.asarray(image.convert("RGB"))


@pytest.mark.filterwarnings("ignore")
def test_generated_files_have_the_pixels_of_pillow_or_a_reason() -> None:
    draw, seen = random.Random(11), Counter[str]()
    for number in range(FILES):
        what, data, wide = made(draw)
        try:
            found = decode(data, 3)
        except ImageError as error:
            assert error.reason and error.detail
            seen["refused"] += 1
            if "cut" not in what:
                assert error.reason == "unsupported_pixels" and what.split()[1] in ("I", "F"), (number, what, error)
            continue
        if wide is not None:
            turned = np.asarray(of_pillow(data)).shape[:2]
            exif = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
            stand_in = Image.fromarray(wide)
            stand_in.getexif()[0x0112] = exif
            wanted = np.asarray(ImageOps.exif_transpose(stand_in).convert("RGB"))
            assert wanted.shape[:2] == turned
        else:
            wanted = of_pillow(data)
        assert np.array_equal(found, wanted), (number, what)
        joined = np.frombuffer(data, np.uint8), np.array([0, len(data)])
        assert np.array_equal(decode_files(*joined, found.shape[:2], 3)[0], wanted), (number, what)
        seen[what.split()[0]] += 1
    assert set(seen) == {*MODES, "refused"} and min(seen.values()) > 15 and seen["refused"] < FILES / 5, seen


def png(bits: int, colours: int, samples: np.ndarray, transparent: tuple[int, ...]) -> bytes:
    """A PNG of samples (H, W, C) at any depth, with one transparent colour, written without Pillow."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width, _ = samples.shape
    places = np.arange(bits)[::-1]
    rows = np.packbits((samples.reshape(height, -1, 1) >> places & 1).reshape(height, -1).astype(np.uint8), axis=1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0))]
    parts += [chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)), chunk(b"IDAT", zlib.compress(body))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_transparent_grey_is_white_at_each_depth(bits: int) -> None:
    most = (1 << bits) - 1
    samples = np.random.default_rng(bits).integers(0, most + 1, (9, 7, 1))
    for key in {0, 1, int(samples[3, 3, 0]), most}:
        grey = samples >> 8 if bits == 16 else samples * 255 // most
        wanted = np.where(samples == key, 255, grey).astype(np.uint8)
        np.testing.assert_array_equal(decode(png(bits, 0, samples, (key,)), 1), wanted)


def test_a_transparent_colour_of_8_bits_is_white_and_one_of_16_is_refused() -> None:
    samples = np.random.default_rng(0).integers(0, 2, (9, 7, 3)) * 200
    wanted = np.where((samples == (200, 0, 200)).all(-1, keepdims=True), 255, samples)
    np.testing.assert_array_equal(decode(png(8, 2, samples, (200, 0, 200)), 3), wanted)
    with pytest.raises(ImageError, match="unsupported_pixels: 16-bit colours, of which one is transparent"):
        decode(png(16, 2, samples * 257, (200 * 257, 0, 200 * 257)), 3)


@pytest.mark.parametrize("most", [1, 7, 255, 1023, 4095, 65535])
@pytest.mark.parametrize("plain", [False, True])
def test_a_pnm_of_any_range_is_scaled_to_8_bits(most: int, plain: bool) -> None:
    samples = np.random.default_rng(most).integers(0, most + 1, (5, 4))
    text = " ".join(map(str, samples.ravel())).encode()
    body = text if plain else samples.astype(">u2" if most > 255 else np.uint8).tobytes()
    found = decode(b"P%d\n# a comment\n4 5\n%d\n" % (2 if plain else 5, most) + body, 1)[:, :, 0]
    exact = samples / most * (65535 / 256 if most > 255 else 255)  # the upper 8 of 16 bits, or rounded
    assert np.array_equal(found, np.floor(np.round(exact * 256) / 256) if most > 255 else np.round(exact))


def test_an_orientation_that_is_no_whole_number_counts_as_pillow_counts_it() -> None:
    pixels = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    exif = struct.pack("<2sHIHHHIIHIIII", b"II", 42, 8, 1, 0x0112, 5, 1, 26, 0, 0, 6, 1, 0)  # 6/1
    for kind in ("JPEG", "PNG"):
        file = io.BytesIO()
        pixels.save(file, kind, exif=b"Exif\0\0" + exif)
        np.testing.assert_array_equal(decode(file.getvalue(), 3), of_pillow(file.getvalue()))
