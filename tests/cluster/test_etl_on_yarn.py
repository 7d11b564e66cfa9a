"""ETL by YARN's executors, on HDFS: what dies on the way costs time, and not a byte."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lockstep.jobs.verify import main as verify
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster
from tests.cluster.test_jobs import LOG, ROOT
from tests.waiting import until

WAIT_S = 1500.0


@pytest.mark.soak  # `make test` kills ETL's workers in tests/etl, and DataNodes under a run in test_run_on_hdfs.py
@pytest.mark.timeout(3000)
def test_one_executor_and_two_among_the_dying(hadoop: Cluster, tmp_path: Path) -> None:
    """A worker, an executor and a DataNode are killed (SIGKILL) under the second of two jobs: the same digests."""
    hadoop.start_yarn()
    root = join(hadoop.hdfs_url, f"dying-{uuid.uuid4().hex}")
    fs, log = filesystem(root), b"".join(gzip.decompress(LOG.read_bytes()).splitlines(keepends=True)[:12_000])
    write_file(fs, join(root, "access.log"), log)
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {**os.environ, **hadoop.env, "PYTHONPATH": str(ROOT), "LOG_BYTES": str(len(log))}
    with (tmp_path / "log").open("wb") as output:
        job = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("spark-submit")), *hadoop.submit_conf,
                "--num-executors", "1", "--executor-memory", "512m", "--driver-memory", "512m",
                "--conf", "spark.yarn.am.memory=256m",
                str(Path(__file__).with_name("dying_on_yarn.py")), join(root, "access.log"), root, str(marks),
            ],
            cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + WAIT_S
        while not (marks / "reading").exists():
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-6000:]
            time.sleep(0.1)
        until(lambda: not hadoop.missing_replicas())
        hadoop.kill("datanode-1")
        (marks / "datanode-died").touch()
        assert job.wait(WAIT_S) == 0, (tmp_path / "log").read_text()[-6000:]
    finally:
        job.kill()
        job.wait()
    assert sorted(mark.name for mark in marks.iterdir()) == [
        "datanode-died", "killed-executor", "killed-worker", "reading",
    ]  # fmt: skip
    one, two = (load_dataset(join(root, name)) for name in ("one", "two"))
    assert one.counts.read == log.count(b"\n") and one.counts == two.counts
    assert one.digest == two.digest and len(two.splits["train"].shards) > 2
    assert verify([join(root, "two")]) == 0
    assert [entry.name for entry in fs.list(root)] == ["access.log", "one", "two"]  # and nothing half done
    fs.delete(root, recursive=True)
