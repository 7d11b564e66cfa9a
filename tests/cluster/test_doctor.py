"""lockstep doctor on a real YARN: its queue before a session waits for it, and the executors in its containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.conf import write_conf
from tests.cluster.daemons import Cluster
from tests.jobs.test_doctor_spark import SCRIPT, SUBMIT, lines_of

QUEUE = str(Path(SCRIPT).with_name("yarn_check.py"))


@pytest.mark.soak
def test_on_yarn_the_queue_and_the_containers_are_described(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop.start_yarn()
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    found = lines_of(SUBMIT, *hadoop.submit_conf, SCRIPT, cwd=tmp_path, code=0)
    assert found["yarn"].startswith("OK   queue default has 100% of the cluster, at most 100%, 0% of it used; 1 nodes")
    room = "room for 2 executors of 2560 MiB next to the application master"  # of 1,024, of what 3 would leave 512
    assert found["yarn"].endswith(f" with 8192 MiB and 8 cores free, {room}")
    assert found["slots"] == "OK   2 task slots, as many ranks at once"
    assert all(line.startswith("OK ") for line in found.values()), found
    hadoop.pause("resourcemanager")
    found = lines_of(sys.executable, QUEUE, cwd=tmp_path, code=1)
    assert found["yarn"].startswith("FAIL the queue: no answer from YARN's ResourceManager "), found


@pytest.mark.slow
def test_a_wrong_queue_is_named_before_a_session_waits(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop.start_yarn()
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    call = [SUBMIT, *hadoop.submit_conf, "--queue", "nights", QUEUE]
    assert lines_of(*call, cwd=tmp_path, code=1)["yarn"].startswith("FAIL YARN has no queue 'nights' | Name one of")


@pytest.mark.soak
def test_executors_without_room_and_an_absent_resourcemanager_are_named(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop.start_yarn()
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    large = ["--executor-memory", "5g", "--num-executors", "2", QUEUE]
    found = lines_of(SUBMIT, *hadoop.submit_conf, *large, cwd=tmp_path, code=0)["yarn"]
    assert found.startswith("WARN queue default has 100% ") and "room for 1 executors of 6656 MiB" in found
    assert "next to the application master, of 2 that" in found
    write_conf(tmp_path / "conf", tmp_path, {**hadoop.ports, "resourcemanager": hadoop.ports["kdc"]})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("YARN_CONF_DIR", str(tmp_path / "conf"))
    found = lines_of(sys.executable, QUEUE, cwd=tmp_path, code=1)["yarn"]
    assert found.startswith(("FAIL YARN's ResourceManager", "FAIL the queue: no answer from YARN's ResourceManager"))
    assert str(hadoop.ports["kdc"]) in found
