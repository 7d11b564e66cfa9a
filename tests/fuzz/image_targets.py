"""Fuzz targets: image files, archives of them, and the binary sets IDX, CIFAR and Parquet."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from lockstep.etl.images import cifar, idx, npz, parquet
from lockstep.etl.images import tar as tar_images
from lockstep.etl.images.source import RECORD, ImagePlan
from lockstep.etl.images.tar_format import BLOCK
from lockstep.etl.input.files import find_sources
from lockstep.features.images.decode import ImageError, Limits, checked_header, decode, read_header
from lockstep.features.images.intake import Intake
from tests.fuzz.target import Target, refused, scratch

LIMITS = Limits(max_file_bytes=1 << 20, max_pixels=1 << 20)
_INTAKE = Intake(size=(4, 4), channels=3, how="pad", limits=LIMITS)
_CHECKSUM_AT, _SIZE_AT = 148, 124


def images(data: bytes) -> None:
    """An image is refused by its header, refused while it is decoded, or gives the pixels that its header says."""
    data = _png_checksums(data)
    try:
        header = checked_header(data, LIMITS)
    except ImageError:
        return
    for channels in (1, 3):
        try:
            pixels = decode(data, channels, LIMITS)
        except ImageError:
            continue
        height, width, found = pixels.shape
        assert found == channels and pixels.dtype == np.uint8 and height * width <= LIMITS.max_pixels
        if header.height is not None and header.format in ("JPEG", "PNG", "WEBP"):
            assert sorted((height, width)) == sorted((header.height, header.width or 0)), (header, pixels.shape)
        assert len(_INTAKE.take(data)) == 4 * 4 * 3


def _png_checksums(data: bytes) -> bytes:
    """The same bytes with each chunk's checksum right, if they begin as a PNG does."""
    if data[:4] != b"\x89PNG":
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


def image_seeds() -> list[bytes]:
    """Small images of each format and of many kinds of pixels."""
    rgb = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    base = Image.fromarray(rgb)
    wide = Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1000)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (base, "JPEG", {"quality": 50}),
        (base, "JPEG", {"progressive": True, "exif": exif}),
        (base.convert("L"), "JPEG", {}),
        (base.convert("CMYK"), "JPEG", {}),
        *((base.convert(mode), "PNG", {}) for mode in ("RGB", "RGBA", "P", "LA", "1")),
        (wide, "PNG", {}),
        (base.convert("P"), "PNG", {"transparency": 3}),
        (base, "PNG", {"exif": exif}),
        (base.convert("P"), "GIF", {}),
        (base.convert("L"), "GIF", {"save_all": True, "append_images": [base.convert("L")]}),
        *(
            (base, "TIFF", {"compression": how})
            for how in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
        ),
        (base.convert("1"), "TIFF", {"compression": "group4"}),
        (wide, "TIFF", {}),
        (base.convert("F"), "TIFF", {}),
        (base, "WEBP", {"lossless": True}),
        (base.convert("RGBA"), "WEBP", {"quality": 50, "exif": exif}),
    ]
    seeds = []
    for image, kind, options in kinds:
        file = io.BytesIO()
        image.save(file, kind, **options)
        seeds.append(file.getvalue())
    assert all(read_header(seed) is not None for seed in seeds)
    return seeds


def _read(plan: ImagePlan, num_classes: int | None = None) -> Counter[object]:
    """What all pieces of an input give: each place with its kind and reason, and how often."""
    found: Counter[object] = Counter()
    for piece in plan.pieces:
        for batch in piece.read(_INTAKE, num_classes):
            batch.validate(full=True)
            for row in batch.to_pylist():
                is_record = row["kind"] == RECORD
                assert (row["image"] is not None) == is_record and (row["_reason"] is None) == is_record
                found[(row["_position"], row["kind"], row["_reason"])] += 1
    return found


def tars(data: bytes) -> None:
    """An archive gives the same members whole, cut into stretches, and packed; or it is refused each time."""
    data = _tar_checksums(data)
    if not data or not data.strip(b"\0"):
        return
    url, packed = scratch(data), scratch(gzip.compress(data, 1, mtime=0), "packed")
    found: list[Counter[object] | None] = []
    for path, step in ((url, 1 << 20), (url, 1), (packed, 1)):
        found.append(None)
        with refused():
            found[-1] = _read(tar_images.plan([path], split_bytes=step))
    assert found[0] == found[1], found[:2]
    if found[0] is not None and found[2] is not None:
        assert found[0] == found[2], found


def _tar_checksums(data: bytes) -> bytes:
    """The same bytes with each block that a walk takes for a header carrying its right checksum."""
    out, at = bytearray(data), 0
    while at + BLOCK <= len(out):
        block = out[at : at + BLOCK]
        if any(block):
            total = sum(block[:_CHECKSUM_AT]) + 8 * 32 + sum(block[_CHECKSUM_AT + 8 :])
            out[at + _CHECKSUM_AT : at + _CHECKSUM_AT + 8] = b"%06o\0 " % total
            digits = bytes(block[_SIZE_AT : _SIZE_AT + 12]).split(b"\0")[0].strip()
            size = int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else 0
            at += -(-size // BLOCK) * BLOCK
        at += BLOCK
    return bytes(out)


def _tar_seeds() -> list[bytes]:
    image = image_seeds()[2]
    seeds = []
    for dialect in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=dialect) as tar:
            names = ["train/a/1.jpg", "b/../x.jpg", "b/readme.txt"]
            for name in [*names, *(["c/" + "n" * 120 + ".jpg"] if dialect != tarfile.USTAR_FORMAT else [])]:
                info = tarfile.TarInfo(name)
                info.size = len(image)
                tar.addfile(info, io.BytesIO(image))
            link = tarfile.TarInfo("a/link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        seeds.append(file.getvalue())
    return seeds


def idx_files(data: bytes) -> None:
    """An IDX file gives just the records that its header says, plain and packed, or is refused."""
    if not data:
        return
    for path in (scratch(data), scratch(gzip.compress(data, 1, mtime=0), "packed")):
        with refused():
            (source,) = find_sources([path])
            file = idx.read_header(source)
            if file.shape[0] > 1 << 16:
                continue
            got = b"".join(idx.read_records(file, 0, file.shape[0], 3))
            assert len(got) == file.shape[0] * file.record_bytes


def cifar_files(data: bytes) -> None:
    """Each record of a CIFAR batch, alone, packed or in an archive, is an image or a label out of range."""
    kind = "cifar10" if data[:1] < b"\x80" else "cifar100"
    body = data[1:]
    if not body:
        return
    classes, width = cifar.NUM_CLASSES[kind], cifar.LABEL_BYTES[kind] + cifar.PIXELS
    for name, raw in (("x.bin", body), ("x.bin.gz", gzip.compress(body, 1, mtime=0)), ("x.tar", _tar_checksums(body))):
        path = scratch(raw, name)
        with refused():
            found = _read(cifar.plan([path], kind, given=False, num_classes=classes, split_bytes=1 << 20), classes)
            assert name == "x.tar" or sum(found.values()) * width == len(body)


def parquet_files(data: bytes) -> None:
    """A Parquet file with images and labels; its footer may say anything."""
    if not data:
        return
    url = scratch(data)
    for label, classes in (("label", 3), ("word", None)):
        with refused():
            plan = parquet.plan([url], image="image", label=label, given=False, num_classes=classes)
            assert len(plan.pieces) < 1 << 16
            _read(plan, classes)


def array_files(data: bytes) -> None:
    """Arrays give the images and labels that NumPy loads from them, or are refused."""
    if not data:
        return
    name = "x.npz" if data.startswith(b"PK") else "x.npy"
    labels = io.BytesIO()
    np.save(labels, np.zeros(2, np.uint8))
    inputs = [scratch(data, name), *([scratch(labels.getvalue(), "y.npy")] if name == "x.npy" else [])]
    with refused(), warnings.catch_warnings(action="ignore"):
        plan = npz.plan(inputs, names=(), given=False, num_classes=3, split_bytes=1 << 20)
        assert plan.records is not None and plan.records < 1 << 16
        rows = [row for piece in plan.pieces for batch in piece.read(_INTAKE, 3) for row in batch.to_pylist()]
        assert len(rows) == plan.records
        loaded = np.load(inputs[0], allow_pickle=False)
        arrays = [loaded] if name == "x.npy" else [loaded[one] for one in loaded.files]
        assert plan.records in {len(array) for array in arrays}


def _npz_seeds() -> list[bytes]:
    images, found = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), []
    for write in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        write(file, x=images, y=np.array([0, 2]))
        found.append(file.getvalue())
    file = io.BytesIO()
    np.save(file, images)
    return [*found, file.getvalue()]


def _parquet_seeds() -> list[bytes]:
    found = []
    table = pa.table({"image": image_seeds()[2:5], "label": [0, 1, 7], "word": ["a", None, "b"]})
    for options in ({"compression": "none"}, {"compression": "zstd", "row_group_size": 2}, {"use_dictionary": False}):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, write_page_checksum=True, **options)
        found.append(sink.getvalue().to_pybytes())
    return found


def _idx(shape: Sequence[int], body: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


TARGETS = (
    Target("images", images, image_seeds),
    Target("tars", tars, _tar_seeds, 20480),
    Target(
        "idx", idx_files, lambda: [_idx((2, 3, 2), bytes(12)), _idx((4,), b"abcd"), _idx((1, 2, 2, 3), bytes(12))], 512
    ),
    Target(
        "cifar", cifar_files, lambda: [b"\0" + bytes(3073 * 2), b"\xff" + bytes(3074), b"\0" + _tar_seeds()[0]], 12288
    ),
    Target("npz", array_files, _npz_seeds),
    Target("parquet", parquet_files, _parquet_seeds, 8192),
)
