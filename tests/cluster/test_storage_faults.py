"""Storage while daemons of a real HDFS stand still or die."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from lockstep.jobs.verify import main
from lockstep.storage.errors import StorageError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.storage.make_dataset import make_dataset
from tests.storage.make_run import make_run
from tests.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture
def root(hadoop: Cluster) -> Iterator[str]:
    url = join(hadoop.hdfs_url, f"faults-{uuid.uuid4().hex}")
    filesystem(url).mkdirs(url)
    yield url
    set_hadoop_settings({})


def test_a_frozen_namenode(hadoop: Cluster, root: str) -> None:
    """Calls end at their deadline; one that was under way when it woke is settled, and happened once."""
    with filesystem(root).create(join(root, "a")) as writer:
        writer.write(b"mine")
    set_hadoop_settings({"lockstep.storage.call-deadline-s": "1", "lockstep.storage.give-up-s": "3"})
    fs = filesystem(root)
    hadoop.pause("namenode")
    start = time.monotonic()
    with pytest.raises(StorageError) as caught:
        fs.stat(root)
    assert time.monotonic() - start < 30  # the rest is for a loaded machine
    assert hadoop.hdfs_url.removeprefix("hdfs://") in caught.value.what
    assert caught.value.got and caught.value.allowed and caught.value.next_step
    hadoop.resume("namenode")

    set_hadoop_settings({"lockstep.storage.call-deadline-s": "1", "lockstep.storage.give-up-s": "120"})
    fs = filesystem(root)
    fs.stat(root)
    hadoop.pause("namenode")
    waker = threading.Timer(2.5, hadoop.resume, ("namenode",))
    waker.start()
    try:
        write_file(fs, join(root, "written while it slept"), b"data")
        assert time.monotonic() - start > 2.5
    finally:
        waker.join()
    fs.rename_new(join(root, "a"), join(root, "b"))
    hadoop.pause("namenode")
    waker = threading.Timer(2.5, hadoop.resume, ("namenode",))
    waker.start()
    try:
        fs.rename_new(join(root, "b"), join(root, "c"))
    finally:
        waker.join()
    assert [entry.name for entry in fs.list(root) if not entry.name.startswith(".")] == ["c", "written while it slept"]
    assert fs.read_bytes(join(root, "c")) == b"mine"


def test_a_datanode_dies(hadoop: Cluster, root: str) -> None:
    """What is there is read from the other replica, what is written goes to the other DataNode in the end."""
    fs = filesystem(root)
    data = bytes(range(256)) * 40_000
    write_file(fs, join(root, "before"), data)
    until(lambda: not hadoop.missing_replicas(urlsplit(root).path))
    hadoop.kill("datanode-1")
    assert fs.read_bytes(join(root, "before")) == data
    write_file(fs, join(root, "after"), data)
    assert fs.read_bytes(join(root, "after")) == data
    assert [entry.name for entry in fs.list(root)] == ["after", "before"]


def test_a_namenode_dies_and_comes_back(hadoop: Cluster, root: str) -> None:
    write_file(filesystem(root), join(root, "f"), b"data")
    set_hadoop_settings({"lockstep.storage.give-up-s": "2", "lockstep.storage.call-deadline-s": "2"})
    fs = filesystem(root)
    hadoop.kill("namenode")
    with pytest.raises(StorageError, match=hadoop.hdfs_url.removeprefix("hdfs://")):
        fs.read_bytes(join(root, "f"))
    set_hadoop_settings({"lockstep.storage.give-up-s": "400"})  # longer than a loaded machine starts a NameNode
    fs = filesystem(root)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_file, fs, join(root, "g"), b"data")  # waits for it, and through its safe mode
        # Here, not in the pool: a daemon dies with the thread that started it.
        hadoop.start("namenode")
        written.result(400)
    assert fs.read_bytes(join(root, "g")) == b"data"
    assert fs.read_bytes(join(root, "f")) == b"data"


def test_verify_on_hdfs(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A dataset, a run and a checkpoint; then a byte changed, a file missing and one too many."""
    fs = filesystem(root)
    for fmt in ("tfrecord", "parquet"):
        make_dataset(join(root, fmt), fmt=fmt)
        assert main([join(root, fmt)]) == 0
    make_run(join(root, "run"))
    assert main([join(root, "run")]) == 0
    assert main([join(root, "run", "checkpoints", "step-0000000200.g0002")]) == 0
    capsys.readouterr()

    shard = join(root, "tfrecord", "split=train", "part-00001.tfrecord")
    data = bytearray(fs.read_bytes(shard))
    data[100] ^= 4
    with fs.create(shard, exclusive=False) as writer:
        writer.write(data)
    fs.delete(join(root, "tfrecord", "_fitted", "page.json"))
    write_file(fs, join(root, "tfrecord", "_fitted", "other.json"), b"")
    assert main([join(root, "tfrecord")]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 3
    assert any("part-00001.tfrecord, record 2, offset" in line for line in wrong)
    assert any("page.json: missing" in line for line in wrong) and any("other.json: an extra" in line for line in wrong)
