"""The contract over WebHDFS on a real HDFS, and what only WebHDFS has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from lockstep.etl.logs import job
from lockstep.etl.logs.config import LogsConfig
from lockstep.jobs.verify import main as verify
from lockstep.storage.errors import LockstepError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.webhdfs import WebHdfsFileSystem
from lockstep.storage.files.webhdfs_http import path_of
from lockstep.storage.files.webhdfs_streams import locate
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.cluster.test_jobs import cut_log
from tests.fs_contract import FileSystemContract, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


class TestWebHdfs(FileSystemContract):
    """The whole contract."""


def test_what_the_contract_does_not_ask(hadoop: Cluster, fs: FileSystem, root: str) -> None:
    assert isinstance(fs, WebHdfsFileSystem)
    put(fs, join(root, "f"), b"x" * 100)
    nodes = [f"127.0.0.1:{hadoop.ports[f'datanode-{number}-http']}" for number in (1, 2)]
    for failed, other in (nodes, nodes[::-1]):  # each has a replica, and is sent to by chance where none is left out
        there = [locate(fs.calls._data, path_of(join(root, "f")), 0, 10, [failed]) for _ in range(5)]
        assert {urlsplit(where).netloc for where in there} == {other}
    stored = fs.stored_checksum(join(root, "f"))
    assert stored is not None and stored.algorithm == "MD5-of-0MD5-of-512CRC32C" and len(stored.value) == 28

    writer = fs.create(join(root, "taken"))
    writer.write(b"x")
    fs.delete(join(root, "taken"))
    with pytest.raises(LockstepError, match="taken over"):
        writer.close()
    assert not fs.exists(join(root, "taken"))  # not brought back by what was still to be written

    path = root.split("/", 3)[3]
    second = f"webhdfs://127.0.0.1:9,127.0.0.1:{hadoop.ports['namenode-http']}/{path}/f"
    assert filesystem(second).read_bytes(second) == b"x" * 100
    both = filesystem(f"{hadoop.hdfs_url}/{path}/f")
    assert both.read_bytes(f"{hadoop.hdfs_url}/{path}/f") == b"x" * 100


@pytest.mark.slow
def test_a_dataset_from_a_log_on_webhdfs(spark: SparkSession, fs: FileSystem, root: str, tmp_path: Path) -> None:
    """Read, written and verified over HTTP alone."""
    log = Path(cut_log(tmp_path / "access.log", 1_500))
    write_file(fs, join(root, "raw", "access.log"), log.read_bytes() + b"no line of a log\n")
    config = LogsConfig(inputs=(join(root, "raw"),), output=join(root, "dataset"), split="group:visitor:80/20")
    manifest = job.run(spark, config)
    assert manifest.counts.read == 1_501 and manifest.counts.quarantined >= 1
    assert isinstance(fs, WebHdfsFileSystem)
    private = fs.calls.call(lambda client: client.status(path_of(join(root, "dataset", "_quarantine"))), "stat", root)
    assert private["permission"] == "700"
    assert verify([join(root, "dataset")]) == 0
    assert [entry.name for entry in fs.list(root)] == ["dataset", "raw"]
