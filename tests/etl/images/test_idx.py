"""IDX files: what their header promises is what they must hold."""

from __future__ import annotations

import bz2
import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.images.idx import IdxFile, pair_up, read_header, read_records
from lockstep.etl.images.job import check
from lockstep.etl.input.files import find_sources
from lockstep.storage.errors import ConfigError, DataError, NotFoundError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def idx(path: Path, shape: tuple[int, ...], data: bytes, *, packed: bool | str = False, magic: int = 0x0800) -> Path:
    content = struct.pack(f">I{len(shape)}I", magic + len(shape), *shape) + data
    path.write_bytes(PACK["gzip" if packed is True else packed](content) if packed else content)
    return path


def header(path: Path) -> IdxFile:
    return read_header(find_sources([str(path)])[0])


@pytest.mark.parametrize("packed", [False, *PACK])
def test_reading_any_range(tmp_path: Path, packed: bool | str) -> None:
    data = bytes(range(30))
    file = header(idx(tmp_path / "x", (5, 2, 3), data, packed=packed))
    assert (file.shape, file.record_bytes, file.position(1)) == ((5, 2, 3), 6, 22)
    for first in range(5):
        for count in range(1, 6 - first):
            got = b"".join(read_records(file, first, count, 2))
            assert got == data[first * 6 : (first + count) * 6]


def test_a_truncated_plain_file_is_told_before_spark(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wrong length") as caught:
        header(idx(tmp_path / "x", (5, 2, 3), bytes(29)))
    assert caught.value.got == "45 bytes" and "46 bytes" in caught.value.allowed and "5 x 2 x 3" in caught.value.allowed


@pytest.mark.parametrize(("size", "got"), [(29, "45 bytes"), (31, "47 bytes or more")])
def test_a_packed_file_of_another_length_is_told_when_read(tmp_path: Path, size: int, got: str) -> None:
    file = header(idx(tmp_path / "x", (5, 2, 3), bytes(size), packed=True))
    with pytest.raises(DataError, match="wrong length") as caught:
        list(read_records(file, 0, 5, 2))
    assert caught.value.got == got


def test_a_packed_file_that_ends_before_the_range(tmp_path: Path) -> None:
    file = header(idx(tmp_path / "x", (5, 2, 3), bytes(3), packed=True))
    with pytest.raises(DataError, match="wrong length") as caught:
        list(read_records(file, 2, 3, 2))
    assert caught.value.got == "28 bytes or fewer"


@pytest.mark.parametrize("codec", PACK)
def test_a_cut_packed_stream(tmp_path: Path, codec: str) -> None:
    path = idx(tmp_path / "x", (50, 2, 3), bytes(range(150)) * 2, packed=codec)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"damaged {codec}"):
        list(read_records(header(path), 0, 50, 2))


@pytest.mark.parametrize(
    "content",
    [
        b"\x00",
        b"\x00\x00\x0d\x03" + bytes(16),
        b"\x00\x00\x08\x05" + bytes(20),
        b"noise, no IDX",
        b"\x00\x00\x08\x03\x00",
    ],
)
def test_what_is_no_idx_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError) as caught:
        header(tmp_path / "x")
    assert caught.value.got and caught.value.allowed and caught.value.next_step


@pytest.mark.parametrize("shape", [(5, 4096, 4096, 4096), (2**32 - 1, 2, 3), (5, 0, 3), (0, 2, 3)])
def test_a_packed_header_that_promises_what_no_image_set_has(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = idx(tmp_path / "x", shape, bytes(30), packed=True)
    with pytest.raises(DataError, match="is not an image set") as caught:
        header(path)
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def config(folder: Path, split: str = "80/20") -> ImagesConfig:
    return ImagesConfig(inputs=(str(folder),), output=str(folder / "out"), split=split)


def test_files_are_paired_by_name(tmp_path: Path) -> None:
    idx(tmp_path / "train-images-idx3-ubyte.gz", (2, 1, 1), bytes(2), packed=True)
    idx(tmp_path / "train-labels-idx1-ubyte", (2,), bytes(2))
    idx(tmp_path / "t10k-images-idx3-ubyte", (1, 1, 1), bytes(1))
    idx(tmp_path / "t10k-labels-idx1-ubyte", (1,), bytes(1))
    pairs = pair_up(find_sources([str(tmp_path)]), given=True)
    assert [(pair.split, pair.images.shape, pair.labels.shape) for pair in pairs] == [
        ("test", (1, 1, 1), (1,)),
        ("train", (2, 1, 1), (2,)),
    ]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    images = idx(tmp_path / "a-images-idx3-ubyte", (2, 1, 1), bytes(2))
    with pytest.raises(NotFoundError, match="no file of labels"):
        check(config(tmp_path))
    labels = idx(tmp_path / "a-labels-idx1-ubyte", (3,), bytes(3))
    with pytest.raises(DataError, match="do not belong together"):
        check(config(tmp_path))
    idx(labels, (2,), bytes(2))
    with pytest.raises(ConfigError, match="does not name its split"):
        check(config(tmp_path, "given"))
    with pytest.raises(ConfigError, match="--split is invalid"):
        config(tmp_path, "group:a:80/20")
    idx(images, (2,), bytes(2))
    with pytest.raises(DataError, match="dimensions"):
        check(config(tmp_path))
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(ConfigError, match="not named like"):
        check(config(tmp_path))
