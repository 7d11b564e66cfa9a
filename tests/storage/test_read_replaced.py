"""The ends of read_replaced that a loop of writers does not reach; tests/fs_contract.py has that loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.storage.errors import CorruptionError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileStat
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.publish import read_replaced


class ReplacedAtEachLook(LocalFileSystem):
    """A stand-in: at each look `replacing` files have been replaced by a longer one."""

    def __init__(self, replacing: int) -> None:
        self.looks, self._replacing = 0, replacing

    def stat(self, url: str) -> FileStat:
        self.looks += 1
        if self.looks <= self._replacing:
            Path(url).write_bytes(b"x" * self.looks)
        return super().stat(url)


def test_a_stand_in_that_is_replaced_at_each_look_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="replaced faster than it can be read") as caught:
        read_replaced(ReplacedAtEachLook(1000), str(tmp_path / "f"), 0.2)
    assert "reads in 0.2 s" in caught.value.got and caught.value.next_step


def test_a_stand_in_that_is_replaced_three_times_is_read_once_it_rests(tmp_path: Path) -> None:
    fs = ReplacedAtEachLook(3)
    assert read_replaced(fs, str(tmp_path / "f")) == b"xxx"
    assert fs.looks == 4  # before and after each of two reads


def test_what_is_missing_or_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for url in (tmp_path / "none", tmp_path):
        with pytest.raises(NotFoundError):
            read_replaced(LocalFileSystem(), str(url), 0.0)


def test_a_file_that_is_not_replaced_raises_what_its_read_raises(tmp_path: Path) -> None:
    """The read is a stand-in: on HDFS it is that of a file whose writer has died."""

    class Damaged(ReplacedAtEachLook):
        def open_read(self, url: str) -> object:  # type: ignore[override] # it never returns
            raise CorruptionError("file is shorter than it must be", file=url)

    (tmp_path / "f").write_bytes(b"abc")
    fs = Damaged(0)
    with pytest.raises(CorruptionError):
        read_replaced(fs, str(tmp_path / "f"))
    assert fs.looks == 2
