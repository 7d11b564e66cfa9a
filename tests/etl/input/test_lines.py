"""Lines of ranges: however a file is cut, each line comes once, with its position; damage is told."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.etl.input import lines
from lockstep.etl.input.files import BOM, Range, find_sources, plan_ranges
from lockstep.etl.input.lines import Lines, LongLine, read_lines
from lockstep.storage.errors import DataError, NotFoundError

Found = list[tuple[int, bytes | LongLine]]


def read(path: Path, split_bytes: int, chunk_bytes: int) -> Found:
    found: Found = []
    for part in plan_ranges(find_sources([str(path)]), split_bytes):
        found += read_range(part, chunk_bytes)
    return found


def read_range(part: Range, chunk_bytes: int, **how: Any) -> Found:
    found: Found = []
    for item in read_lines(part, chunk_bytes, **how):
        if isinstance(item, LongLine):
            found.append((item.position, item))
        else:
            assert isinstance(item, Lines)
            found += zip(item.positions.tolist(), item.values.to_pylist(), strict=True)
    return sorted(found, key=lambda line: line[0])


def expected(data: bytes, limit: int) -> Found:
    """The definition: lines end with a newline or the file's end; a carriage return before it belongs to the end."""
    found: Found = []
    position = 0
    for line in data.split(b"\n")[: -1 if data.endswith(b"\n") else None]:
        if len(line) > limit:
            long = LongLine(position, line[: lines.RAW_BYTES], len(line), hashlib.sha256(line).hexdigest())
            found.append((position, long))
        else:
            found.append((position, line.removesuffix(b"\r")))
        position += len(line) + 1
    return found


def test_a_small_file_does_not_leave_the_next_one_uncut(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    (tmp_path / "b").write_bytes(b"12\n" * 10)
    found = plan_ranges(find_sources([str(tmp_path)]), 10)
    assert [(part.source_index, part.start, part.whole) for part in found] == [
        (0, 0, True), (1, 0, False), (1, 10, False), (1, 20, False),
    ]  # fmt: skip


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n", b"\r", b"\r\n", b"d" * 9]), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 20),
)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_cut_gives_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], split_bytes: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 12)
    data = b"".join(pieces)
    (tmp_path / "log").write_bytes(data)
    (tmp_path / "packed").write_bytes(gzip.compress(data))
    assert read(tmp_path / "log", split_bytes, chunk_bytes) == expected(data, 12)
    assert read(tmp_path / "packed", split_bytes, chunk_bytes) == expected(data, 12)


def records(data: bytes, limit: int) -> Found:
    """The definition: a record ends with the first newline outside quotes, or with the file. A quote opens at the start
    of a field alone; in a field in quotes two are text, and one ends it.
    """
    found: Found = []
    start, place, state = 0, 3 * data.startswith(b"\xef\xbb\xbf"), "start"

    def add(end: int) -> None:
        line = data[start:end]
        if len(line) > limit:
            digest, inside = hashlib.sha256(line).hexdigest(), line.count(b"\n")
            found.append((start, LongLine(start, line[: lines.RAW_BYTES], len(line), digest, inside)))
        else:
            found.append((start, line.removesuffix(b"\r")))

    while place < len(data):
        byte = data[place : place + 1]
        if state == "quoted":
            state = "closed" if byte == b'"' else "quoted"
        elif byte == b'"' and state != "plain":
            state = "quoted"  # behind one that closed, the two are a quote of the text
        elif byte == b"\n":
            add(place)
            start, state = place + 1, "start"
        else:
            state = "start" if byte == b"," else "plain"
        place += 1
    if start < len(data):
        add(len(data))
    return found


@given(
    st.lists(
        st.sampled_from([b"a", b",", b'"', b"\n", b"\r\n", b'""', b'"b\nc"', b',"', b'",', b"d" * 9]),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 20),
    st.booleans(),
)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_records_with_newlines_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], chunk_bytes: int, bom: bool
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 12)
    data = (BOM if bom else b"") + b"".join(pieces)
    (tmp_path / "log").write_bytes(data)
    (part,) = plan_ranges(find_sources([str(tmp_path / "log")]), 1, whole=True)
    assert read_range(part, chunk_bytes, quoted_newlines=True) == records(data, 12)


def test_a_line_that_begins_where_a_range_ends_belongs_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"ab\ncd\n")
    assert [read_range(Range(0, str(path), start, 3, "none"), 100) for start in (0, 3)] == [[(0, b"ab")], [(3, b"cd")]]


def test_memory_stays_bounded_on_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data = b"x" * (lines.MAX_LINE_BYTES * 3) + b"\nnext\n"
    path.write_bytes(data)
    (_, long), following = read(path, 1 << 30, 1 << 16)
    assert isinstance(long, LongLine) and len(long.raw) == lines.RAW_BYTES
    assert long.length == lines.MAX_LINE_BYTES * 3 and following == (long.length + 1, b"next")


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\n"))
    assert read(path, 1, 1 << 20) == [(0, b"a"), (2, b"bc")]


@pytest.mark.parametrize("keep", [3, 12, 40, -1, -9])
def test_a_cut_gzip_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(500))[:keep])
    with pytest.raises(DataError, match=r"log\.gz is a damaged gzip file") as caught:
        read(path, 1, 1 << 20)
    assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(np.random.default_rng(0).bytes(5000)))
    packed[2500] ^= 1
    (tmp_path / "log.gz").write_bytes(packed)
    with pytest.raises(DataError, match="damaged gzip"):
        read(tmp_path / "log.gz", 1, 1 << 20)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\n")
    with pytest.raises(DataError, match="became shorter"):
        read_range(Range(0, str(path), 0, 100, "none"), 10)


def test_sources_and_their_errors(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "_hidden", ".hidden"):
        (tmp_path / name).write_bytes(b"x\n")
    assert [Path(s.url).name for s in find_sources([str(tmp_path)])] == ["a.log", "b.log"]
    (tmp_path / "c.log").touch()
    with pytest.raises(DataError, match="is empty"):
        find_sources([str(tmp_path)])
    with pytest.raises(NotFoundError, match="does not exist"):
        find_sources([str(tmp_path / "none")])
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFoundError, match="holds no file"):
        find_sources([str(tmp_path / "folder")])
