"""A run whose checkpoints lie on a real HDFS: daemons die and freeze under it, and drivers replace each other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.storage.errors import StorageAwayError, StorageError, StorageTimeoutError
from lockstep.storage.files.hdfs import HdfsFileSystem
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.publish import is_temporary, write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks, train
from lockstep.training.launch.local import run_local
from lockstep.training.run.lineage import find_tip, read_claims
from lockstep.training.run.paths import RunPaths
from tests.cluster.daemons import Cluster
from tests.training import _ranks
from tests.training._driver_alone import drive
from tests.training._tiny import write_table
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 600.0
# What the cluster's NameNode is told (tests/cluster/conf.py): it takes a dead DataNode for alive for 14 s.
# And it is waited for for as long as a loaded machine takes to start it anew.
FAST = {
    "dfs.namenode.heartbeat.recheck-interval": "2000",
    "dfs.heartbeat.interval": "1",
    "lockstep.storage.give-up-s": "300",
}
QUICK = {"lockstep.storage.data-deadline-s": "1", "dfs.client.failover.max.attempts": "2"}
LATE_S = 40  # after a deadline of some seconds, on a loaded machine; without it the call would take longer


@pytest.fixture
def config(hadoop: Cluster) -> Iterator[TrainConfig]:
    root = join(hadoop.hdfs_url, f"run-{uuid.uuid4().hex}")
    write_table(join(root, "data"))
    yield TrainConfig(
        datasets=(join(root, "data"),), run=join(root, "run"), model="tiny", num_ranks=1, global_batch=8, epochs=2,
        checkpoint_every=5, keep_checkpoints=2, launcher="local",
    )  # fmt: skip
    set_hadoop_settings({})


def test_run_goes_on_through_a_dead_namenode_and_a_dead_datanode(
    hadoop: Cluster, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither costs the run a restart: calls under way are settled, files under way are written anew."""
    _ranks.rank_path(monkeypatch)
    set_hadoop_settings(FAST)
    slow = config.but(num_ranks=2, epochs=4, stall_limit_s=300.0)
    fs, paths, results, told = filesystem(config.run), RunPaths(config.run), [], []

    def go() -> None:
        try:
            results.append(train(slow, run_local, hooks=Hooks(entry="_ranks:train_slowly")))
        except BaseException as error:  # told by the test's own thread
            told.append(error)

    def step() -> int:
        tip = find_tip(fs, paths)
        return tip.ref.step if tip else 0

    driver = threading.Thread(target=go)
    driver.start()
    until(lambda: told or step() >= 5)
    hadoop.kill("namenode")
    hadoop.start("namenode")  # here, not in another thread: a daemon dies with the thread that started it
    seen = step()
    until(lambda: told or results or step() > seen)
    until(lambda: told or results or not hadoop.missing_replicas())  # a block's only replica must not die with its node
    hadoop.kill("datanode-1")
    driver.join(WAIT_S)
    assert not told, told
    (result,) = results
    assert (result.steps, result.generation, result.restarts) == (50, 1, 0), capfd.readouterr().err[-6000:]
    assert verify(config.run) == []


def test_run_whose_namenode_stays_away_ends_with_one_error_and_resumes(
    hadoop: Cluster, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the NameNode, for how long it served nothing, and the checkpoint; the same call resumes there."""
    _ranks.rank_path(monkeypatch)
    set_hadoop_settings({**FAST, "lockstep.storage.give-up-s": "10"})
    paths, hooks = RunPaths(config.run), Hooks(entry="_ranks:train_slowly")
    saved, told = filesystem(paths.root), list[BaseException]()

    def go() -> None:
        try:
            train(config, run_local, hooks=hooks)
        except BaseException as error:  # for the test's own thread
            told.append(error)

    driver = threading.Thread(target=go)
    driver.start()
    # The driver knows of the first one when it makes the second.
    until(lambda: told or (saved.exists(paths.checkpoints) and len(saved.list(paths.checkpoints)) > 1))
    hadoop.kill("namenode")
    driver.join(WAIT_S)
    hadoop.start("namenode")
    (error,) = told
    assert isinstance(error, StorageAwayError)
    address = hadoop.hdfs_url.removeprefix("hdfs://")
    said = rf"reached: the NameNode at {address} has served nothing for \d+ s; once it is back, the same call resumes "
    found = re.search(rf"{said}{config.run} from (step-\d+\.g0001)$", error.what)
    assert found and "Connection refused" in error.got, error
    set_hadoop_settings(FAST)
    assert train(config, run_local, hooks=hooks).steps == 25
    claims = read_claims(filesystem(config.run), paths)
    assert str(claims[2].parent) >= found[1]  # the NameNode may have renamed one without an answer to the driver


@pytest.mark.parametrize(
    ("method", "pattern"),
    [  # all others on a local disk: tests/training/driver/test_take_over.py
        ("rename_new", r"/checkpoints/step-0000000010"),
        ("rename_new", r"/\.trash/g0001/"),
    ],
)
def test_driver_that_wakes_changes_nothing(config: TrainConfig, method: str, pattern: str) -> None:
    command = [sys.executable, "-m", "tests.training._driver_alone", json.dumps(config.to_json()), method, pattern]
    old = subprocess.Popen([*command, "train"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _, status = os.waitpid(old.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), old.communicate()[0]
        assert drive(config, take_over=True).steps == 25
        before = everything(config.run)
        os.kill(old.pid, signal.SIGCONT)
        assert "SupersededError" in old.communicate(timeout=WAIT_S)[0]
        assert old.returncode == 1
        assert everything(config.run) == before
    finally:
        old.kill()
        old.wait()


def everything(run: str) -> dict[str, bytes]:
    """Each file of the run and its bytes, but for temporary files and what an old rank still uploads."""
    fs = filesystem(run)
    files = {f.url.removeprefix(run): f for f in walk(fs, run) if not is_temporary(f.name)}
    return {name: fs.read_bytes(f.url) for name, f in files.items() if not name.startswith("/.staging/g0001-")}


@pytest.mark.parametrize("at", ["write", "close"])
def test_frozen_pipeline_ends_a_call_at_its_deadline(
    hadoop: Cluster, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Both DataNodes stand still, so the first one does, whichever it is; both come back, and the file is written."""
    set_hadoop_settings({**QUICK, "lockstep.storage.data-deadline-s": "30", "lockstep.storage.give-up-s": "120"})
    monkeypatch.setattr(
        "lockstep.storage.files.hdfs._PROBE_S", 30.0
    )  # the NameNode is asked whether it is the one that stands still
    fs, url = filesystem(config.run), join(config.run, "file")
    assert isinstance(fs, HdfsFileSystem)
    data = bytes(range(256)) * 60_000  # several pieces, and more than the sockets between take
    writer = fs.create(join(config.run, "half"))
    writer.write(data)
    if at == "close":
        writer.sync()
    for name in ("datanode-1", "datanode-2"):
        hadoop.pause(name)
    fs.data_deadline_s = 1.0
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        if at == "write":
            for _ in range(20):
                writer.write(data)
        else:
            writer.close()
    assert time.monotonic() - began < LATE_S
    if isinstance(caught.value, StorageTimeoutError):
        assert "no answer from a DataNode" in caught.value.what and hadoop.hdfs_url[7:] in caught.value.got
    writer.abort()

    def wake() -> None:
        for name in ("datanode-1", "datanode-2"):
            hadoop.resume(name)
        fs.data_deadline_s = 30.0

    waker = threading.Timer(2.0, wake)
    waker.start()
    try:
        write_file(fs, url, data)  # begun anew under another name until they are back
    finally:
        waker.join()
    assert [entry.name for entry in fs.list(config.run) if not is_temporary(entry.name)] == ["file"]
    assert fs.read_bytes(url) == data


def test_frozen_datanodes_end_a_read_at_its_deadline(
    hadoop: Cluster, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, url = filesystem(config.run), join(config.run, "file")
    data = bytes(range(256)) * 20_000
    write_file(fs, url, data)
    set_hadoop_settings({**QUICK, "lockstep.storage.give-up-s": "3"})
    monkeypatch.setattr("lockstep.storage.files.hdfs._PROBE_S", 30.0)
    for name in ("datanode-1", "datanode-2"):
        hadoop.pause(name)
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        filesystem(url).read_bytes(url)
    assert time.monotonic() - began < LATE_S
    assert "no answer from a DataNode" in caught.value.got
    for name in ("datanode-1", "datanode-2"):
        hadoop.resume(name)
    assert fs.read_bytes(url) == data
