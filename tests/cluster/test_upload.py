"""lockstep upload on a real HDFS: killed in the middle and run again; a DataNode that dies under a read and an
upload.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest
from lockstep.storage.upload import find_files, upload
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster

ROOT = Path(__file__).resolve().parents[2]
BIG_BYTES = 48 << 20
WAIT_S = 400.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two small files, one with a name that URLs must quote, and one that takes a second or two."""
    folder = tmp_path / "source"
    (folder / "a b").mkdir(parents=True)
    (folder / "a b" / "1+1 = 100% ü.bin").write_bytes(b"small" * 1000)
    (folder / "b").write_bytes(b"")
    with (folder / "big").open("wb") as file:
        file.write(b"begin")
        file.truncate(BIG_BYTES - 3)
        file.seek(0, 2)
        file.write(b"end")
    return folder


@pytest.fixture(params=["webhdfs", "hdfs"])
def target(request: pytest.FixtureRequest, hadoop: Cluster) -> Iterator[str]:
    web = f"webhdfs://127.0.0.1:{hadoop.ports['namenode-http']}"
    url = join(web if request.param == "webhdfs" else hadoop.hdfs_url, f"upload-{uuid.uuid4().hex}")
    yield url
    filesystem(url).discard(url)


STANDS_STILL = """
import sys, time
from lockstep.storage import upload

def count(self, size, plain=upload._Upload._count):
    plain(self, size)
    if size == upload.COPY_BYTES:
        time.sleep(3600)

upload._Upload._count = count
from lockstep.jobs.upload import main
main(sys.argv[1:])
"""


def job(source: Path, target: str, *, to_its_end: bool = True) -> subprocess.Popen[str]:
    """The job, or one that stands still behind the big file's first piece: it cannot be done before it is killed."""
    command = [sys.executable, *(["-m", "lockstep.jobs.upload"] if to_its_end else ["-c", STANDS_STILL])]
    command += ["--input", str(source), "--output", target, "--parallel", "1"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def names(fs: FileSystem, url: str) -> list[str]:
    return [entry.name for entry in fs.list(url)] if fs.exists(url) else []


def wait_for_big(fs: FileSystem, target: str) -> None:
    """Until the big file is on its way, or there."""
    deadline = time.monotonic() + WAIT_S
    while not any(name.startswith(".big.") or name == "big" for name in names(fs, target)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check(fs: FileSystem, source: Path, target: str) -> None:
    assert names(fs, target) == ["a b", "b", "big"]
    (small,) = (source / "a b").iterdir()
    assert [entry.name for entry in fs.list(join(target, "a b"))] == [small.name]
    for path in (small, source / "big"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert file_digest(fs, join(target, str(path.relative_to(source)))) == (path.stat().st_size, digest)


def test_killed_in_the_middle_and_run_again(source: Path, target: str) -> None:
    fs = filesystem(target)
    first = job(source, target, to_its_end=False)
    wait_for_big(fs, target)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=WAIT_S)
    left = names(fs, target)
    assert left[1:] == ["a b", "b"] and left[0].startswith(".big."), left
    second = job(source, target)
    told, _ = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, told
    assert "1 sent, 0 replaced" in told and "2 already there" in told
    check(fs, source, target)


def test_a_datanode_dies_under_a_read_and_an_upload(hadoop: Cluster, source: Path) -> None:
    web = f"webhdfs://127.0.0.1:{hadoop.ports['namenode-http']}"
    target = join(web, f"upload-{uuid.uuid4().hex}")
    fs = filesystem(target)
    before = join(target, "before")
    with fs.create(before) as writer:
        writer.write(bytes(range(256)) * (16 << 12))
    with fs.open_read(before) as file, ThreadPoolExecutor(1) as pool:
        read = file.read(1 << 20)
        # only the open answer tells which DataNode serves it
        serving = file.raw._kept[0].url  # type: ignore[attr-defined] # what the reader keeps for itself
        sent = pool.submit(upload, find_files([str(source)], target), target)
        wait_for_big(fs, target)
        (dying,) = (name for name in ("datanode-1", "datanode-2") if f":{hadoop.ports[name + '-http']}/" in serving)
        hadoop.kill(dying)
        read += file.read()
        outcomes = sent.result(WAIT_S)
    assert read == bytes(range(256)) * (16 << 12)
    assert [outcome.done for outcome in outcomes] == ["sent"] * 3
    fs.delete(before)
    check(fs, source, target)
    fs.discard(target)
