"""jobs.doctor on a real YARN: its queue before a session waits for it, and the executors in its containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs import _spark_checks
from tests.cluster.conf import write_conf
from tests.cluster.daemons import Cluster
from tests.jobs.test_doctor_spark import SCRIPT, SUBMIT, lines_of


@pytest.mark.soak
def test_on_yarn_the_queue_and_the_containers_are_described(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop.start_yarn()
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    found = lines_of(SUBMIT, *hadoop.submit_conf, SCRIPT, cwd=tmp_path, code=0)
    assert found["yarn"].startswith("OK   queue default has 100% of the cluster, at most 100%, 0% of it used; 1 nodes")
    assert found["yarn"].endswith(" with 8192 MiB and 8 cores free")
    assert found["slots"] == "OK   2 task slots, as many ranks at once"
    assert all(line.startswith("OK ") for line in found.values()), found


@pytest.mark.slow
def test_a_wrong_queue_and_an_absent_resourcemanager_are_named_before_a_session_waits(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop.start_yarn()
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    script = f"""
import sys
sys.path.insert(0, {str(Path(SCRIPT).parents[2])!r})
from jobs._spark_checks import check_yarn
from jobs.doctor import passes
sys.exit(not passes("yarn", check_yarn))
"""
    (tmp_path / "check.py").write_text(script)
    call = [SUBMIT, *hadoop.submit_conf, "--queue", "nights", str(tmp_path / "check.py")]
    assert lines_of(*call, cwd=tmp_path, code=1)["yarn"].startswith("FAIL YARN has no queue 'nights' | Name one of")
    write_conf(tmp_path / "conf", tmp_path, {**hadoop.ports, "resourcemanager": hadoop.ports["kdc"]})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("YARN_CONF_DIR", str(tmp_path / "conf"))
    found = lines_of(sys.executable, str(tmp_path / "check.py"), cwd=tmp_path, code=1)["yarn"]
    assert found.startswith(("FAIL YARN's ResourceManager", "FAIL the queue: no answer from YARN's ResourceManager"))
    assert str(hadoop.ports["kdc"]) in found and _spark_checks.YARN_LIMIT_S == 20.0
