"""Quotas, permissions and snapshots of a real HDFS: what the error of each says, and what it does to a run."""

from __future__ import annotations

import os
import urllib.request
import uuid
from collections.abc import Iterator
from urllib.parse import urlencode, urlsplit

import pytest

from lockstep.storage.errors import ConfigError, DeniedError, DiskFullError
from lockstep.storage.files.hdfs import HdfsFileSystem
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.files.webhdfs import WebHdfsFileSystem
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.publish import write_file
from lockstep.storage.settings import hadoop_settings, set_hadoop_settings
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from tests.cluster.daemons import Cluster
from tests.training import _ranks
from tests.training._tiny import write_table


def ask(hadoop: Cluster, path: str, op: str, **parameters: str) -> None:
    """An order of an administrator, over WebHDFS: `hdfs dfsadmin` would start Java."""
    user = os.environ.get("USER") or "root"
    query = urlencode({"op": op, "user.name": user, **parameters})
    url = f"http://127.0.0.1:{hadoop.ports['namenode-http']}/webhdfs/v1{path}?{query}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()


@pytest.fixture
def folder(hadoop: Cluster) -> Iterator[str]:
    """The path of a new folder."""
    path = f"/cures-{uuid.uuid4().hex}"
    filesystem(hadoop.hdfs_url).mkdirs(hadoop.hdfs_url + path)
    yield path
    set_hadoop_settings({})


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_quotas_and_permissions_are_named_with_their_cure(
    hadoop: Cluster, folder: str, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    authority = (
        f"127.0.0.1:{hadoop.ports['namenode-http']}" if scheme == "webhdfs" else urlsplit(hadoop.hdfs_url).netloc
    )
    root = f"{scheme}://{authority}{folder}"
    fs = filesystem(root)

    names, space = join(root, "names"), join(root, "space")
    fs.mkdirs(names)
    ask(hadoop, f"{folder}/names", "SETQUOTA", namespacequota="2")
    write_file(fs, join(names, "a"), b"a")
    with pytest.raises(DiskFullError) as full:
        write_file(fs, join(names, "b"), b"b")
    assert f"the quota of names of {folder}/names is used up: 3 with this one, of 2 files" in full.value.what
    assert "--keep-checkpoints" in full.value.next_step and f"-setQuota N {folder}/names" in full.value.next_step

    fs.mkdirs(space)
    ask(hadoop, f"{folder}/space", "SETQUOTA", storagespacequota="1048576")
    with pytest.raises(DiskFullError) as full:
        write_file(fs, join(space, "a"), b"a")
    assert f"the quota of space of {folder}/space is used up" in full.value.what and "1048576 bytes" in full.value.what
    assert f"-setSpaceQuota N {folder}/space" in full.value.next_step

    with pytest.raises(ConfigError, match="a name in it is too long: 300 bytes"):
        fs.mkdirs(join(root, "x" * 300))

    kept = join(root, "kept")
    fs.mkdirs(kept)
    ask(hadoop, f"{folder}/kept", "SETPERMISSION", permission="700")
    bob: FileSystem
    monkeypatch.setenv("HADOOP_USER_NAME", "bob")
    if scheme == "hdfs":
        bob = HdfsFileSystem(authority, hadoop_settings())
    else:
        bob = WebHdfsFileSystem(authority, hadoop_settings(), user="bob", token=None)
    with pytest.raises(
        DeniedError, match=r"bob has no \w+ at /cures-\w+/kept, which belongs to .*drwx------"
    ) as denied:
        bob.list(kept)
    assert f"-setfacl -m user:bob:rwx {folder}/kept" in denied.value.next_step


def test_a_run_whose_quota_is_used_up_ends_with_one_error_and_resumes_when_it_is_raised(
    hadoop: Cluster, folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _ranks.rank_path(monkeypatch)
    root = hadoop.hdfs_url + folder
    write_table(join(root, "data"))
    config = TrainConfig(
        datasets=(join(root, "data"),), run=join(root, "run"), model="tiny", num_ranks=1, global_batch=8, epochs=2,
        checkpoint_every=5, launcher="local",
    )  # fmt: skip
    limited: list[int] = []

    def limits() -> None:
        if not limited:
            saved = filesystem(config.run)
            limited.append(sum(1 for _ in walk(saved, config.run)))
            ask(hadoop, f"{folder}/run", "SETQUOTA", namespacequota="1")

    hooks = Hooks(entry="_ranks:train", before_rename=limits)
    with pytest.raises(DiskFullError, match=f"the quota of names of {folder}/run is used up") as full:
        train(config, run_local, hooks=hooks)
    assert "It resumes from step-" in full.value.next_step or "It resumes from the start" in full.value.next_step
    assert "generation 1 failed" not in capfd.readouterr().err, "a restart would meet the quota again"
    ask(hadoop, f"{folder}/run", "SETQUOTA", namespacequota="100000")
    result = train(config, run_local, hooks=hooks)
    assert (result.steps, result.generation, verify(config.run)) == (25, 2, [])
