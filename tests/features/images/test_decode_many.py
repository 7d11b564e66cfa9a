"""Many image files into one array: the same whatever the threads, and the first bad file is named."""

from __future__ import annotations

import copy
import io
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.features.encode.encoder import Encoder
from lockstep.features.images import decode_many
from lockstep.features.images.decode import ImageError, decode, read_header
from lockstep.features.images.decode_many import BadImageError, decode_files, set_decode_threads
from lockstep.features.images.resize import fit
from lockstep.features.schema.fields import Field
from lockstep.features.schema.schema import Schema


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool = decode_many._Pool()
    monkeypatch.setattr(decode_many, "_pool", pool)
    monkeypatch.setattr(decode_many, "_PART_BYTES", 2000)  # several parts of a few small files
    yield
    if pool._made is not None:
        pool._made[2].shutdown()


def files(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        pixels = rng.integers(0, 256, (12 + number % 3, 10, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, ("JPEG", "PNG")[number % 2])
        found.append(out.getvalue())
    return found


def together(parts: list[bytes]) -> tuple[Any, Any]:
    lead = b"before"  # a slice of a column begins anywhere
    data = np.frombuffer(lead + b"".join(parts), dtype=np.uint8)
    return data, len(lead) + np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "channels", "how"), [((12, 10), 3, "resize"), ((8, 8), 1, "crop"), ((9, 5), 3, "pad")]
)
def test_files_come_out_in_order_at_any_number_of_threads(
    threads: int, size: tuple[int, int], channels: int, how: str
) -> None:
    set_decode_threads(threads)
    parts = files(23)
    expected = np.stack([fit(decode(part, channels)[None], *size, how)[0] for part in parts])
    assert np.array_equal(decode_files(*together(parts), size, channels, how), expected)


def jpeg(mode: str, height: int = 9, width: int = 9, **more: Any) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(out, "JPEG", **more)
    return out.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6
JPEGS = [
    jpeg("RGB"),
    jpeg("L"),
    jpeg("CMYK"),
    jpeg("RGB", progressive=True),
    jpeg("RGB", exif=EXIF),
    jpeg("RGB", 8),
    jpeg("RGB", width=8),
    jpeg("RGB", comment=b"Exif \xff\xc0"),
]


def test_plain_files_are_known_by_their_headers() -> None:
    found = decode_many._plain(*together([*JPEGS, b"", b"\xff\xd8\xff"]), (9, 9), 3)
    assert found == [True, *[False] * 6, True, *[False] * 2]
    assert decode_many._plain(*together(JPEGS), (9, 9), 1) == [False, True, *[False] * 6]


@settings(max_examples=150, deadline=None)  # the first call compiles
@given(data=st.data())
def test_a_changed_file_gives_the_pixels_or_the_refusal_that_it_gives_alone(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(JPEGS)))
    for _ in range(data.draw(st.integers(0, 2))):
        file[data.draw(st.integers(0, min(len(file) - 1, 700)))] = data.draw(
            st.sampled_from([0, 1, 3, 9, 0xC0, 0xDA, 0xFF])
        )
    whole = bytes(file[: data.draw(st.sampled_from([len(file)] * 3 + [5, 20, 170, len(file) - 2]))])
    channels = data.draw(st.sampled_from([1, 3]))
    if decode_many._plain(*together([whole]), (9, 9), channels)[0]:
        header = read_header(whole)
        assert header is not None and (header.height, header.width, header.components) == (9, 9, channels)
        assert not header.is_described and not header.progressive
    try:
        pixels = fit(decode(whole, channels)[None], 9, 9, "resize")
    except ImageError as error:
        with pytest.raises(BadImageError) as refused:
            decode_files(*together([whole]), (9, 9), channels)
        assert refused.value.got == str(error)
    else:
        assert np.array_equal(decode_files(*together([whole]), (9, 9), channels), pixels)


def test_no_files_are_an_empty_array() -> None:
    assert decode_files(np.zeros(0, np.uint8), np.zeros(1, np.int64), (4, 5), 3).shape == (0, 4, 5, 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_bad_file_is_the_one_that_is_told(threads: int) -> None:
    set_decode_threads(threads)
    parts = files(40)
    for row in (31, 17, 22):
        parts[row] = parts[row][:60]
    parts[38] = b"no image"
    with pytest.raises(BadImageError, match="cannot be decoded") as refused:
        decode_files(*together(parts), (12, 10), 3)
    assert refused.value.row == 17
    placed = refused.value.of(-1).at("part-00000.tfrecord, record 5")
    assert "sample id ffffffffffffffff, part-00000.tfrecord, record 5" in placed.what and "broken_image" in placed.got
    assert str(copy.copy(placed)) == str(placed)  # as it crosses processes
    assert decode_files(*together(files(40)), (12, 10), 3).shape == (40, 12, 10, 3)  # the threads are still there


def test_of_two_threads_failures_the_first_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    set_decode_threads(2)
    both = threading.Barrier(2)

    def bad(file: bytes, _channels: int) -> None:
        both.wait(300)  # until the other thread has a bad file, too
        time.sleep(0.1 * (file == b"a"))
        raise ImageError("broken_image", file.decode())

    monkeypatch.setattr(decode_many, "decode", bad)
    with pytest.raises(BadImageError) as refused:
        decode_files(*together([b"a", b"b"]), (30, 30), 3)  # a part each
    assert refused.value.row == 0


def test_an_encoder_names_the_sample_of_a_bad_image() -> None:
    encoding = {"kind": "image", "height": 12, "width": 10, "channels": 3}
    schema = Schema(
        (
            Field(name="sample_id", dtype="int64", kind="id"),
            Field(name="image", dtype="bytes", encoding=encoding),
            Field(name="label", dtype="int64", kind="label", num_classes=2),
        )
    )
    parts = files(9)
    parts[6] = parts[6][:30]
    columns = [list(range(-1, 8)), parts, [0] * 9]
    rows = pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=schema.arrow_schema())
    encoder = Encoder(schema, {})
    assert np.array_equal(
        encoder.encode(rows.slice(1, 5)).x["image"][2], fit(decode(parts[3], 3)[None], 12, 10, "resize")[0]
    )

    def in_two_steps(batch: pa.RecordBatch) -> Any:
        early: Any = encoder.early(batch)
        return encoder.late(early)

    for encode in (encoder.encode, in_two_steps):
        with pytest.raises(BadImageError, match="sample id 0000000000000005"):
            encode(rows.slice(2))


def test_another_error_of_a_thread_is_raised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    set_decode_threads(2)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decode_many, "decode", out_of_memory)
    with pytest.raises(MemoryError):
        decode_files(*together(files(20)), (12, 10), 3)


def test_a_forked_process_makes_threads_of_its_own() -> None:
    set_decode_threads(2)
    parts = together(files(20))
    expected = decode_files(*parts, (12, 10), 3).sum()
    child = os.fork()
    if child == 0:
        os._exit(0 if decode_files(*parts, (12, 10), 3).sum() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
