"""The contract on a real HDFS, and what only HDFS has."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.storage.errors import CorruptionError, ExistsError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.fs_contract import FileSystemContract, put

pytestmark = pytest.mark.cluster


@pytest.fixture
def root(hadoop: Any) -> Iterator[str]:
    url = join(hadoop.hdfs_url, f"contract-{uuid.uuid4().hex}")
    filesystem(url).mkdirs(url)
    yield url
    filesystem(url).delete(url, recursive=True)


class TestHdfs(FileSystemContract):
    """The whole contract."""


def test_an_unclosed_file_is_refused(fs: FileSystem, root: str) -> None:
    url = join(root, "f")
    writer = fs.create(url)
    writer.write(b"x" * 1000)
    writer.sync()
    assert fs.stat(url).size_bytes == 1000
    with pytest.raises(CorruptionError, match="never closed"):
        fs.read_bytes(url)
    with pytest.raises(CorruptionError, match="never closed"), fs.open_read(url) as file:
        file.read()
    writer.close()


def test_a_writer_whose_file_was_taken_does_not_pass_for_written(fs: FileSystem, root: str) -> None:
    url = join(root, "f")
    writer = fs.create(url)
    writer.write(b"x")
    fs.delete(url)
    with pytest.raises(Exception, match="taken over"):
        writer.close()
    writer.abort()


def test_urls_of_a_listing_keep_their_authority(fs: FileSystem, root: str) -> None:
    put(fs, join(root, "f"))
    assert fs.list(root + "/")[0].url == join(root, "f")
    with pytest.raises(ExistsError):
        fs.rename_new(join(root, "f"), root)


def test_a_forked_child_neither_hangs_nor_shares_the_client(fs: FileSystem, root: str) -> None:
    """Spark's Python workers and preexec_fn fork: a client lives on threads, and a fork has none of them."""
    put(fs, join(root, "f"), b"data")
    code = f"""
import os, sys
from lockstep.storage.fs import filesystem
url = {join(root, "f")!r}
assert filesystem(url).read_bytes(url) == b"data"
child = os.fork()
if child == 0:
    os._exit(0 if filesystem(url).read_bytes(url) == b"data" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
