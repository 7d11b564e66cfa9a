"""Hosts that fail repeatedly are left out for a while: the decision by a table, and real executors that are killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from lockstep.training.control.failures import Failure, LauncherError, RankFailedError, RankState, Weight
from lockstep.training.launch.executors import HostFailures, failed_host
from tests.training._two_hosts import HOSTS, ROOT


@pytest.mark.parametrize(
    ("at_s", "expected"),
    [
        ([0, 10], [None, 600]),
        ([0, 3601], [None, None]),  # too far apart
        ([0, 10, 20, 609], [None, 600, None, None]),  # while it is left out nothing counts
        ([0, 10, 611, 612], [None, 600, None, 1200]),  # taken back, and twice as long
        ([0, 0, 1e4, 1e4, 2e4, 2e4, 3e4, 3e4, 4e4, 4e4], [None, 600, None, 1200, None, 2400, None, 4800, None, 7200]),
    ],
)
def test_a_host_is_left_out_after_two_failures_for_longer_each_time(
    at_s: list[float], expected: list[float | None]
) -> None:
    now = 0.0
    hosts = HostFailures(lambda: now)
    found: list[float | None] = []
    for now in at_s:
        hosts.failed("other") if now == 0 and not found else None  # its failure is counted by itself
        found.append(hosts.failed("bad"))
        assert ("bad" in hosts.left_out()) is (found[-1] is not None or 10 < now < 610)
        assert "other" not in hosts.left_out()
    assert found == expected
    now += 7201
    assert not hosts.left_out()


@pytest.mark.parametrize(
    ("weight", "blamed"),
    [
        (Weight.ENDED, True),
        (Weight.LOST, True),
        (Weight.SILENT, True),
        (Weight.FINAL, False),
        (Weight.RAISED, False),
        (Weight.CONSEQUENCE, False),
    ],
)
def test_a_host_is_blamed_for_what_may_be_its_fault(weight: Weight, blamed: bool) -> None:
    error = RankFailedError(Failure(RankState(0, host="10.0.0.2"), "because", weight), 2)
    assert failed_host(error) is None
    error.executor_host = "host-b"
    assert failed_host(error) == ("host-b" if blamed else None)
    lost = LauncherError("a stage failed")
    assert failed_host(lost) is None
    lost.host = "host-c"
    assert failed_host(lost) == "host-c"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("manager", ["standalone", "yarn"])
def test_a_host_that_lost_two_executors_is_left_out_unless_there_is_no_other(tmp_path: Path, manager: str) -> None:
    """A process of its own: this one's Spark session has another master."""
    assert pyspark.__file__ is not None
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    environment |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(ROOT / "tests" / "spark"),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_SUBMIT_ARGS": "--driver-memory 512m pyspark-shell",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = "yarn" if manager == "yarn" else str(port)
    command = [sys.executable, "-m", "tests.training._two_hosts", str(tmp_path), where]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for host, ran in told["one"]:
        assert ran == [[0, next(other for other in HOSTS if other != host)]]
    assert told["two"][0] == [0, HOSTS[1]] and told["two"][1] == [1, HOSTS[0]]
    assert sorted(row for row, _ in told["no other"]) == [0, 1] and {host for _, host in told["no other"]} == set(HOSTS)
    bad = told["failed"][-1]
    assert told["failed"].count(bad) == 2 and told["then"] in set(HOSTS) - {bad}
    assert any(line == f"{bad} is left out for 10 minutes: it failed 2 times" for line in told["reports"])
