"""Long local files past the page cache: the same bytes, whatever the file system can, wherever they begin and end."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.storage.files import local
from lockstep.storage.files.local import PAGE_BYTES, whole_pages, write_uncached
from lockstep.storage.fs import filesystem

PIECE = 2 * PAGE_BYTES


def memory(size: int, *, shifted: bool = False) -> memoryview:
    """Random bytes that begin with a page, or within one."""
    place = whole_pages(size + 1)[1:] if shifted else whole_pages(size)
    place[:] = np.random.default_rng(size).integers(0, 256, place.size, np.uint8)
    return place[:size].data


def refuse(*_: Any) -> int:
    raise OSError(errno.EINVAL, "refused")


def check(url: str, data: memoryview, before: bytes = b"") -> None:
    """Written in pieces behind what was written otherwise, and read in pieces, each into the same memory."""
    fs, piece, found = filesystem(url), whole_pages(PIECE), b""
    with fs.create(url) as writer:
        writer.write(before)
        for start in range(0, len(data), PIECE):
            assert writer.write_uncached(data[start : start + PIECE]) == len(data[start : start + PIECE])
        writer.write(b"end")
        writer.sync()
    with fs.open_uncached(url) as file:
        while count := file.readinto(piece.data):  # type: ignore[attr-defined]  # each has it
            found += piece[:count].tobytes()
    assert found == before + data.tobytes() + b"end" == Path(url).read_bytes()


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PIECE, 5 * PIECE + 77])
def test_pieces_come_back_as_they_were(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(str(tmp_path / "whole"), memory(size))
    check(str(tmp_path / "memory within a page"), memory(size, shifted=True))
    check(str(tmp_path / "place within a page"), memory(size), b"before")
    with monkeypatch.context() as patch:  # a file system whose files cannot be opened so
        patch.setattr(fcntl, "fcntl", lambda fd, what, *more: refuse() if more and more[0] & os.O_DIRECT else 0)
        check(str(tmp_path / "refused"), memory(size))
    monkeypatch.setattr(local, "_O_DIRECT", 0)  # a system without it
    check(str(tmp_path / "without"), memory(size))


def test_what_is_written_in_part_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that is nearly full does: the rest begins within a page, which has to come by the page cache."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: PAGE_BYTES + 512]))
    check(str(tmp_path / "f"), memory(3 * PIECE))


def test_other_errors_are_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, _data: memoryview) -> int:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        raise OSError(errno.ENOSPC, "full")

    descriptor = os.open(tmp_path / "f", os.O_WRONLY | os.O_CREAT)
    try:
        if not write_uncached(descriptor, memory(PIECE)):
            pytest.skip("this file system has no O_DIRECT")
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            write_uncached(descriptor, memory(PIECE))
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT  # as it was, for whoever writes next
    finally:
        os.close(descriptor)
