"""The command line of `make cluster`; spark-submit on YARN is in test_jobs.py and the README's test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs._cli import run_job
from tests.cluster.__main__ import main
from tests.cluster.daemons import HDFS, YARN, Cluster
from tests.cluster.process import Process

ROOT = Path(__file__).resolve().parents[2]


class Command:
    """`python -m tests.cluster` in a process of its own."""

    def __call__(self, action: str, folder: Path) -> tuple[int, str]:
        """Returns exit code and output."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.cluster", action, "--dir", str(folder)],
            cwd=ROOT, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr


class CommandHere(Command):
    """In this process, with daemons that only sleep: the real ones take half a minute of processor time to start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("lockstep.storage.files.deadlines.left_behind", lambda: 0)
        monkeypatch.setattr(Cluster, "_format", lambda cluster: (cluster.folder / "logs").mkdir(exist_ok=True))
        monkeypatch.setattr(Cluster, "_java", lambda cluster, name: ["sleep", "600"])
        monkeypatch.setattr(Cluster, "_serves", lambda cluster, name: True)
        self._capsys = capsys

    def __call__(self, action: str, folder: Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            run_job(main, [action, "--dir", str(folder)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(self._capsys.readouterr())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_make_clusters_command_starts_tells_and_ends_just_its_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], real: bool
) -> None:
    command = Command() if real else CommandHere(monkeypatch, capsys)
    assert command("status", tmp_path)[0] == 1
    code, told = command("up", tmp_path)
    state = json.loads((tmp_path / "cluster.json").read_text())
    processes = [Process(**entry) for entry in state["processes"]]
    try:
        assert code == 0, told
        assert [process.name for process in processes] == [*HDFS, *YARN]
        assert all(process.alive for process in processes)
        assert f"export HADOOP_CONF_DIR={tmp_path / 'conf'}" in told and "spark-submit --master yarn" in told
        code, again = command("up", tmp_path)
        assert code == 0 and "runs already" in again
        processes[0].end()
        code, refused = command("up", tmp_path)
        assert code == 2 and "a part of the cluster" in refused and "Traceback" not in refused
    finally:
        code, told = command("down", tmp_path)
    assert code == 0 and told.count(" ended") == 4 and "was gone already" in told
    assert not any(process.alive for process in processes)
    assert command("down", tmp_path) == (0, f"No cluster runs under {tmp_path}.\n")


def test_a_new_cluster_removes_the_package_of_the_one_before_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, package, folder = CommandHere(monkeypatch, capsys), tmp_path / "package.sh", tmp_path / "cluster"
    monkeypatch.setattr("tests.cluster.__main__.PACKAGE", package)

    def another() -> str:
        try:
            code, told = command("up", folder)
            assert code == 0, told
            return told
        finally:
            command("down", folder)

    another()
    package.write_text("export LOCKSTEP_ETL=hdfs://production:8020/lockstep/a.tar.gz\n")
    assert "Removed" not in another() and package.exists()
    hdfs = re.search(r"HDFS=(.*)", (folder / "env.sh").read_text())
    assert hdfs is not None
    package.write_text(f"export LOCKSTEP_ETL={hdfs[1]}/lockstep/a.tar.gz\n")
    told = another()
    assert f"its archives were on {hdfs[1]}, which is gone. Run `make package URL=" in told and not package.exists()
