"""The contract over WebHDFS on a real HDFS, and what only WebHDFS has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from storage.fs import FileSystem, filesystem, join
from tests.cluster.daemons import Cluster
from tests.fs_contract import FileSystemContract

pytestmark = pytest.mark.cluster


@pytest.fixture
def web(hadoop: Cluster) -> str:
    return f"webhdfs://127.0.0.1:{hadoop.ports['namenode-http']}"


@pytest.fixture
def root(web: str) -> Iterator[str]:
    url = join(web, f"contract-{uuid.uuid4().hex}")
    filesystem(url).mkdirs(url)
    yield url
    filesystem(url).delete(url, recursive=True)


@pytest.fixture
def fs(root: str) -> FileSystem:
    return filesystem(root)


class TestWebHdfs(FileSystemContract):
    """The whole contract."""

    durable_sync = False
