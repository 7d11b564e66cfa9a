"""Folders that `hdfs dfs -mv` and `-cp` have moved or copied on a real HDFS."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.moved_contract import Displaces, MovedContract


@pytest.fixture
def root(hadoop: Cluster) -> Iterator[str]:
    folder = join(hadoop.hdfs_url, f"moved {uuid.uuid4().hex}")
    filesystem(folder).mkdirs(folder)
    yield folder
    filesystem(folder).delete(folder, recursive=True)


@pytest.fixture
def displaces(hadoop: Cluster) -> Displaces:
    def go(old: str, new: str, copied: bool) -> None:
        words = hadoop._jvm(256, "org.apache.hadoop.fs.FsShell", "-cp" if copied else "-mv", old, new)
        hadoop._run("shell", words)

    return go


class TestOnHdfs(MovedContract):
    """All that the contract says."""
