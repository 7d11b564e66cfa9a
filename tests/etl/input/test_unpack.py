"""Packed files: what they are by their first bytes, several members, damage, and no more memory than a chunk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lockstep.etl.input.files import find_lines, find_sources, plan_ranges, source_name
from lockstep.etl.input.unpack import codec_of, unpacked
from lockstep.storage.errors import DataError

DATA = b"".join(b"line %d\n" % number for number in range(20_000))
SKIPPABLE = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"hello"


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "bzip2": bz2.compress, "zstd": zstd}


def unpack(codec: str, packed: bytes, chunk_bytes: int = 1000) -> bytes:
    return b"".join(unpacked("log", io.BytesIO(packed), codec, chunk_bytes))


@pytest.mark.parametrize("codec", PACK)
def test_members_damage_and_rubbish(codec: str) -> None:
    packed = PACK[codec](DATA)
    assert codec_of(packed[:10]) == codec and codec_of(PACK[codec](b"")[:14]) == codec
    assert unpack(codec, packed) == DATA
    assert unpack(codec, packed + PACK[codec](b"more")) == DATA + b"more"
    bad = [packed[:-3], packed[: len(packed) // 2], packed + packed[:9], packed + b"rubbish behind it"]
    for number, damaged in enumerate(bad):
        with pytest.raises(DataError, match=f"is a damaged {codec} file") as caught:
            unpack(codec, damaged)
        assert "decompressed bytes" in caught.value.got, number


@pytest.mark.parametrize(
    ("head", "codec"),
    [
        (b"", "none"),
        (b"B", "none"),
        (b"BZhang - - [", "none"),  # a host's name
        (b"BZh9", "none"),
        (b"(\xb5/\xfd", "zstd"),
        (SKIPPABLE[:8], "zstd"),  # pzstd begins with a frame to be skipped
        (b"\x60\x2a\x4d\x18", "none"),
        (b"\x1f\x8b", "gzip"),
    ],
)
def test_first_bytes(head: bytes, codec: str) -> None:
    assert codec_of(head) == codec


def test_frames_to_be_skipped() -> None:
    assert unpack("zstd", SKIPPABLE + zstd(DATA) + SKIPPABLE + zstd(b"x")) == DATA + b"x"


def test_a_bomb_takes_no_memory() -> None:
    size = 256 << 20
    packed = zstd(bytes(size)) + zstd(bytes(size))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(map(len, unpacked("log", io.BytesIO(packed), "zstd", 1 << 20))) == 2 * size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_flipped_bytes_end_in_one_error_or_in_bytes() -> None:
    rng = np.random.default_rng(0)
    for codec, pack in PACK.items():
        packed = pack(DATA[:3000])
        for _ in range(60):
            broken = bytearray(packed)
            broken[int(rng.integers(len(broken)))] ^= 1 << int(rng.integers(8))
            try:
                unpack(codec, bytes(broken))
            except DataError as error:
                assert error.next_step


def test_packers_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.xz").write_bytes(lzma.compress(DATA))
    with pytest.raises(DataError, match=r"log\.xz has a compression") as caught:
        find_sources([str(tmp_path)])
    assert caught.value.got == "xz" and "zstd" in caught.value.allowed


@pytest.mark.parametrize("count", [1, 20_000])
@pytest.mark.parametrize("outer", [gzip.compress, bz2.compress, zstd])
@pytest.mark.parametrize("inner", [gzip.compress, bz2.compress, zstd, lzma.compress])
def test_a_packed_file_inside_a_packed_file_is_refused_by_name(
    tmp_path: Path, inner: Callable[[bytes], bytes], outer: Callable[[bytes], bytes], count: int
) -> None:
    lines = b"id,y\n" + b"".join(b"%d,1\n" % number for number in range(count))
    (tmp_path / "a.csv").write_bytes(lines)
    (tmp_path / "b.csv.gz").write_bytes(outer(inner(lines)))
    with pytest.raises(DataError, match=r"b\.csv\.gz is a packed file inside a packed file"):
        find_lines([str(tmp_path)], header=True)


def test_a_packed_file_is_one_range_under_its_plain_name(tmp_path: Path) -> None:
    for name, pack in (("a.log.gz", gzip.compress), ("b.log.bz2", bz2.compress), ("c.log.zst", zstd)):
        (tmp_path / name).write_bytes(pack(DATA))
    sources = find_sources([str(tmp_path)])
    assert [source.codec for source in sources] == ["gzip", "bzip2", "zstd"]
    assert [source_name(source.url) for source in sources] == ["a.log", "b.log", "c.log"]
    assert len(plan_ranges(sources, 10)) == 3
