"""Tar archives: members in place, whatever the dialect; damage is told with its place; nothing reaches outside."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.etl.images.tar import read_member
from lockstep.etl.images.tar_format import MAX_PADDING_BYTES, Member, plan_stretches, read_members
from lockstep.etl.input.unpack import Forward
from lockstep.storage.errors import DataError

LONG = "train/" + "d" * 90 + "/" + "f" * 120 + ".jpg"


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def archive(entries: list[tuple[tarfile.TarInfo, bytes]], dialect: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def contents(path: Path, start: int = 0, end: int | None = None) -> list[tuple[int, str, bool, bytes]]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    size = path.stat().st_size
    last = None if packed else size if end is None else end
    with Forward(str(path), "gzip" if packed else "none") as stream:
        found = []
        for member in read_members(stream, str(path), start, last, to_end=last in (None, size)):
            found.append((member.position, member.name, member.is_file, stream.at(member.offset, member.size)))
        return found


SOME = [
    entry("./", kind=tarfile.DIRTYPE),
    entry("a/1.jpg", b"one"),
    entry("a/empty.jpg"),
    entry(LONG, b"x" * 513),
    entry("b/émeu.png", b"y" * 512),
    entry("b/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    entry("b/hard", kind=tarfile.LNKTYPE, link="a/1.jpg"),
    entry("b/pipe", kind=tarfile.FIFOTYPE),
    entry("b/disk", kind=tarfile.BLKTYPE),
    entry("b/last.jpg", b"z" * 5000),
]
GONE = {"b/link", "b/hard", "b/pipe", "b/disk"}


@pytest.mark.parametrize("dialect", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("packed", [False, True])
def test_members_of_each_dialect(tmp_path: Path, dialect: int, packed: bool) -> None:
    data = archive(SOME, dialect)
    (tmp_path / "x").write_bytes(gzip.compress(data) if packed else data)
    found = contents(tmp_path / "x")
    wanted = [(info.name, content) for info, content in SOME if info.type != tarfile.DIRTYPE]
    assert [(name, content) for _, name, _, content in found] == wanted
    assert {name for _, name, is_file, _ in found if not is_file} == GONE
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        behind = {info.offset_data for info in tar if info.type != tarfile.DIRTYPE}
    assert {position + 512 for position, *_ in found} == behind


def test_old_archives_and_long_ustar_names(tmp_path: Path) -> None:
    name = "p" * 100 + "/" + "n" * 90
    (tmp_path / "x").write_bytes(archive([entry(name, b"1")], tarfile.USTAR_FORMAT))
    assert contents(tmp_path / "x") == [(0, name, True, b"1")]
    info = tarfile.TarInfo("née")  # the checksum of signed bytes, as some old archivers took it
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    block[148:156] = b" " * 8
    signed = sum(byte - 256 if byte > 127 else byte for byte in block)
    block[148:156] = b"%06o\0 " % signed
    (tmp_path / "x").write_bytes(bytes(block) + bytes(1024))
    assert contents(tmp_path / "x") == [(0, "née", True, b"")]


@pytest.mark.parametrize("step", [1, 1000, 3000, 1 << 20])
def test_stretches_hold_each_member_once(tmp_path: Path, step: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(archive(SOME) + archive([entry("c/joined.jpg", b"j")]))
    with Forward(str(path), "none") as stream:
        parts = plan_stretches(stream, str(path), path.stat().st_size, step)
    assert parts[0][0] == 0 and parts[-1][1] == path.stat().st_size
    assert [member for start, end in parts for member in contents(path, start, end)] == contents(path)
    # cut as finely as can be: ten members, and the folder in front of them
    assert len(parts) == {1: 11, 1 << 20: 1}.get(step, len(parts)) and contents(path)[-1][1] == "c/joined.jpg"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a/b.jpg", True),
        ("./a/b.jpg", True),
        ("a/..b/c", True),  # two dots within a name are no way up
        ("../a", False),
        ("a/../../b", False),
        ("/etc/passwd", False),
        ("a\\..\\b", False),
    ],
)
def test_names_that_reach_outside(tmp_path: Path, name: str, safe: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(archive([entry(name, b"1")]))
    with Forward(str(path), "none") as stream:
        assert [member.is_safe for member in read_members(stream, str(path), 0, path.stat().st_size)] == [safe]


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_sparse_file_is_no_image_and_hides_none(tmp_path: Path, blocks: int) -> None:
    """GNU's map may go on for some blocks behind the header, which are neither content nor the next header."""
    header = bytearray(archive([entry("a/sparse", b"1" * 600)], tarfile.GNU_FORMAT)[:512])
    header[156:157], header[482] = b"S", blocks > 0
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    maps = [bytes(504) + bytes([number < blocks - 1]) + bytes(7) for number in range(blocks)]
    data = bytes(header) + b"".join(maps) + b"1" * 600 + bytes(424) + archive([entry("a/1", b"2" * 9)])
    path = tmp_path / "x"
    path.write_bytes(data)
    with Forward(str(path), "none") as stream:
        found = [(m.name, m.is_file, m.offset) for m in read_members(stream, str(path), 0, path.stat().st_size)]
    assert found == [("a/sparse", False, 512 * (1 + blocks)), ("a/1", True, 512 * (4 + blocks))]
    path.write_bytes(data[: 512 * (1 + blocks) - 8])
    with pytest.raises(DataError, match=r"cannot be read on at byte 0\n"):
        contents(path)


def broken(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


TWO = archive([entry("a/1", b"1" * 600), entry("a/2", b"2" * 600)], tarfile.GNU_FORMAT)
SECOND = 512 + 1024


@pytest.mark.parametrize(
    ("data", "place", "got"),
    [
        (broken(TWO, SECOND, b"X"), SECOND, "checksum"),
        (broken(TWO, SECOND + 124, b"\xff"), SECOND, "2f 32"),  # a negative size
        (TWO[: SECOND + 700], SECOND, "a member of 600 bytes"),
        (TWO[: SECOND + 100], SECOND, "the last 100 bytes"),
        (TWO[:SECOND], SECOND, "the end of the file"),  # cut between two members
        (TWO[: SECOND + 512 + 600], SECOND + 512 + 1024, "the end of the file"),  # in what fills up the last block
        (TWO + b"trailing noise" * 100, len(TWO), "checksum|noise|74 72"),
        (b"no archive" * 100, 0, "6e 6f 20"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_told_with_its_place(tmp_path: Path, data: bytes, place: int, got: str, packed: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(DataError, match=rf"cannot be read on at byte {place}\n") as caught:
        contents(path)
    assert any(part in caught.value.got for part in got.split("|")) and caught.value.next_step


@pytest.mark.parametrize("size", [601, 1 << 80])  # one byte too many, and more than anybody could count to
def test_a_packed_archive_may_claim_any_size(tmp_path: Path, size: int) -> None:
    header = bytearray(TWO[SECOND : SECOND + 512])
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(TWO[:SECOND] + bytes(header) + b"2" * 600))
    member = Member(SECOND, "a/2", True, SECOND + 512, size)
    with Forward(str(path), "gzip") as stream:
        assert list(islice(read_members(stream, str(path)), 2))[1] == member
        with pytest.raises(DataError, match=rf"cannot be read on at byte {SECOND}\n"):
            read_member(stream, str(path), member)


def test_an_extension_is_of_the_next_member_wherever_the_archive_is_cut(tmp_path: Path) -> None:
    """Of two members with one, the first is behind an archive's end, the second behind a global header."""
    long = archive([entry(LONG, b"1")], tarfile.GNU_FORMAT)[:1536]  # header, name, member
    told = archive([entry("né/" + "f" * 120, b"2")], tarfile.PAX_FORMAT)[:2048]
    shared = tarfile.TarInfo.create_pax_global_header({"comment": "c"})
    path = tmp_path / "x"
    path.write_bytes(long[:1024] + bytes(1024) + TWO[:SECOND] + told[:1024] + shared + told[1024:] + bytes(1024))
    with Forward(str(path), "none") as stream:
        parts = plan_stretches(stream, str(path), path.stat().st_size, 1)
    found = contents(path)
    assert [member for start, end in parts for member in contents(path, start, end)] == found
    assert [name for _, name, _, _ in found] == ["a/1", "né/" + "f" * 120] and len(parts) == 3


def test_padding_has_an_end_and_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(TWO)
        file.truncate(len(TWO) + (1 << 40))  # a hole of a TiB
    tracemalloc.start()
    with pytest.raises(DataError, match="cannot be read on") as caught:
        contents(path)
    assert str(MAX_PADDING_BYTES) in caught.value.got and tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(flips=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=6), cut=st.floats(0, 1))
def test_damaged_archives_end_in_members_or_an_error(tmp_path: Path, flips: list[tuple[int, int]], cut: float) -> None:
    data = bytearray(archive(SOME))
    for place, value in flips:
        data[place % len(data)] = value
    path = tmp_path / "x"
    path.write_bytes(data[: int(cut * len(data))] if cut < 0.3 else data)
    try:
        found = contents(path)
    except DataError as error:
        assert "cannot be read on at byte" in str(error)
        return
    assert len(found) <= 40
