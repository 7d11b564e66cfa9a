"""The contract of file systems on S3, as moto serves it, and what only an object store has."""

from __future__ import annotations

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.urls import join
from tests.fs_contract import FileSystemContract, put


class TestS3(FileSystemContract):
    """The whole contract."""


class TestS3AsSparkSpellsIt(FileSystemContract):
    @pytest.fixture
    def root(self, root: str) -> str:
        return root.replace("s3://", "s3a://")


def test_a_file_in_parts_appears_when_it_is_closed(fs: FileSystem, root: str) -> None:
    url, data = join(root, "f"), bytes(range(256)) * (140 << 10)
    writer = fs.create(url)
    for start in range(0, len(data), 5 << 20):
        writer.write(data[start : start + (5 << 20)])
    assert not fs.exists(url)
    writer.close()
    assert fs.read_bytes(url) == data
    writer = fs.create(join(root, "g"))
    writer.write(data)
    writer.abort()
    assert [entry.name for entry in fs.list(root)] == ["f"]
    put(fs, url + "2")
