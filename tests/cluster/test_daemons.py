"""The daemons are real, separate processes; killed ones come back; all end with the fixture."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.daemons import HDFS, MAIN, YARN, Cluster, ClusterError
from tests.cluster.process import Process, spawn, started_at

ROOT = Path(__file__).resolve().parents[2]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")


def live_datanodes(hadoop: Cluster) -> int:
    return int(str(hadoop._bean("namenode-http", "service=NameNode,name=FSNamesystemState")["NumLiveDataNodes"]))


def test_each_daemon_is_a_java_process_of_its_own(hadoop: Cluster) -> None:
    hadoop.start_yarn()
    pids = [hadoop.pid(name) for name in (*HDFS, *YARN)]
    assert len(set(pids)) == 5 and os.getpid() not in pids
    for name in (*HDFS, *YARN):
        assert MAIN[name] in command_of(hadoop.pid(name))
    assert live_datanodes(hadoop) == 2


def test_a_killed_datanode_is_noticed_as_dead_and_comes_back(hadoop: Cluster) -> None:
    old = hadoop.pid("datanode-2")
    hadoop.kill("datanode-2")
    assert started_at(old) is None
    deadline = time.monotonic() + 240  # dead after 14 s without a heartbeat
    while live_datanodes(hadoop) != 1:
        assert time.monotonic() < deadline, "the NameNode still counts the killed datanode-2 as live after 240 s"
        time.sleep(0.2)
    hadoop.start("datanode-2")
    assert hadoop.pid("datanode-2") != old
    deadline = time.monotonic() + 240
    while live_datanodes(hadoop) != 2:
        assert time.monotonic() < deadline, "datanode-2 is not live 240 s after its start"
        time.sleep(0.2)


def test_a_paused_namenode_answers_again_when_resumed(hadoop: Cluster) -> None:
    hadoop.pause("namenode")
    assert Path(f"/proc/{hadoop.pid('namenode')}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    hadoop.resume("namenode")
    assert live_datanodes(hadoop) == 2


def test_a_daemon_that_cannot_start_shows_its_last_log_lines(hadoop: Cluster) -> None:
    with pytest.raises(ClusterError, match="runs already"):
        hadoop.start("datanode-1")
    hadoop.kill("datanode-1")
    data, aside = hadoop.folder / "datanode-1", hadoop.folder / "aside"
    data.rename(aside)
    data.write_text("no folder")
    try:
        with pytest.raises(ClusterError, match="datanode-1 ended while it was starting") as caught:
            hadoop.start("datanode-1")
        assert "Too many failed volumes" in caught.value.got
        assert str(hadoop.log("datanode-1")) in caught.value.got
    finally:
        data.unlink()
        aside.rename(data)


def test_what_a_test_left_broken_is_mended(hadoop: Cluster) -> None:
    hadoop.kill("datanode-2")
    hadoop.pause("datanode-1")
    hadoop.heal()
    assert all(hadoop.running(name) for name in HDFS) and live_datanodes(hadoop) == 2


def test_stop_ends_every_process(hadoop: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path)
    other.processes = {
        name: spawn(name, ["sleep", "300"], dict(os.environ), tmp_path / name, keep=False) for name in (*HDFS, *YARN)
    }
    started = list(other.processes.values())
    assert all(process.alive for process in started)
    other.pause("datanode-1")
    other.stop()
    assert not any(process.alive for process in started)
    assert hadoop.running("namenode")


def test_a_pid_given_to_another_process_is_never_signalled() -> None:
    mine = Process("not-a-daemon", os.getpid(), start_time=1)
    assert not mine.alive
    mine.end()  # would end this very test run


def test_daemons_die_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from tests.cluster.process import spawn\n"
        "p = spawn('sleeper', ['sleep', '300'], {}, Path('log'), keep=False)\n"
        "print(p.pid, p.start_time, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid, start_time = map(int, parent.stdout.readline().split())
    child = Process("sleeper", pid, start_time)
    assert child.alive
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while child.alive:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def test_a_kept_process_ends_by_name_of_pid_and_start_time(tmp_path: Path) -> None:
    process = spawn("sleeper", ["sleep", "300"], dict(os.environ), tmp_path / "log", keep=True)
    assert process.alive
    process.end(grace_s=5)
    assert not process.alive
