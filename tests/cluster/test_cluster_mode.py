"""docs/cluster.md in YARN's cluster mode: drivers in application masters, Python and packages from archives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.cluster.daemons import Cluster
from tests.cluster.test_jobs import ROOT, cut_log
from tests.waiting import until

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
LIMIT_S = 900.0
KINDS = ("etl", "training")


class Shell:
    """The page's commands in one environment, with a small log at $HDFS/weblog/raw."""

    def __init__(self, hadoop: Cluster, folder: Path) -> None:
        self.hadoop, self._folder = hadoop, folder
        arguments = " ".join(hadoop.submit_conf)
        self._environment = {**os.environ, **hadoop.env, "HDFS": hadoop.hdfs_url, "YARN": arguments}
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._setup = ""

    def package(self, *kinds: str) -> None:
        """`make package URL=$HDFS/lockstep` of some archives: made once, and only if their files have changed."""
        command = f"make -s package URL=$HDFS/lockstep ARCHIVES='{' '.join(kinds)}'"
        assert "make package URL=$HDFS/lockstep" in PAGE
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [re.search(f"^{name}=.*$", PAGE, re.MULTILINE) for name in ("PACKED", "MASTER")]
        assert all(lines)
        self._setup = "source dist/package.sh\n" + "\n".join(line[0] for line in lines if line)

    def submit(self, script: str, *changes: tuple[str, str]) -> Submitted:
        """Start the page's cluster-mode line of a script, with parts of it replaced."""
        (line,) = re.findall(rf"^spark-submit .*\$MASTER .* jobs/{script} .*$", PAGE, re.MULTILINE)
        for old, new in changes:
            assert old in line
            line = line.replace(old, new)
        log = self._folder / f"{time.time_ns()}.log"
        return Submitted(self.hadoop, f"{self._setup}\n{line}", self._environment, log)


class Submitted:
    """A spark-submit, its output in a file."""

    def __init__(self, hadoop: Cluster, script: str, environment: dict[str, str], log: Path) -> None:
        self._hadoop, self._log = hadoop, log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-euc", script], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def ended(self) -> tuple[int, str]:
        """Exit code and output."""
        return self._process.wait(LIMIT_S), self._log.read_text()

    def pythons(self, command: str) -> list[psutil.Process]:
        """Once there are some: Python processes of the containers whose command line has `command`."""

        def found() -> list[psutil.Process]:
            assert self._process.poll() is None, self._log.read_text()[-6000:]
            nodemanager = psutil.Process(self._hadoop.pid("nodemanager"))
            return [each for each in nodemanager.children(recursive=True) if is_python(each, command)]

        until(lambda: bool(found()), LIMIT_S)
        return found()

    @property
    def printed(self) -> str:
        """What the job printed: the application master's stdout, of all attempts."""
        (application,) = set(re.findall(r"application_\d+_\d+", self._log.read_text()))
        folder = self._hadoop.folder / "yarn-logs" / application
        return "".join(path.read_text() for path in sorted(folder.glob("*_000001/stdout")))


def is_python(process: psutil.Process, command: str) -> bool:
    try:
        name = process.exe().rpartition("/")[2]
        return name.startswith("python") and any(command in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def check_interpreter(process: psutil.Process, hadoop: Cluster) -> None:
    """That a container's Python, its library and its modules are those of the archive, and none of this machine's."""
    unpacked = Path(hadoop.folder, "yarn-local").resolve()
    executable, mapped = process.exe(), [found.path for found in process.memory_maps()]
    prefix = subprocess.run(
        [executable, "-c", "import sys; print(sys.base_prefix)"], env={}, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert unpacked in Path(prefix).parents and Path(executable).is_relative_to(prefix)
    assert any(path.startswith(f"{prefix}/lib/") for path in mapped)
    ours = (sys.base_prefix, str((ROOT / ".venv").resolve()))
    assert not [path for path in mapped if path.startswith(ours)]


@pytest.fixture
def shell(hadoop: Cluster, tmp_path: Path) -> Iterator[Shell]:
    hadoop.start_yarn()
    raw = tmp_path / "raw.log"
    cut_log(raw, 3_000)
    with filesystem(hadoop.hdfs_url).create(f"{hadoop.hdfs_url}/weblog/raw/{raw.name}") as writer:
        writer.write(raw.read_bytes())
    yield Shell(hadoop, tmp_path)
    fs = filesystem(hadoop.hdfs_url)
    for name in ("weblog", "cluster", "lockstep", "user"):
        fs.delete(f"{hadoop.hdfs_url}/{name}", recursive=True)


@pytest.mark.timeout(1800)
def test_an_etl_job_runs_in_cluster_mode_from_an_archive(shell: Shell) -> None:
    shell.package("etl")
    etl = shell.submit("etl_logs.py", ("--num-executors 2", "--num-executors 1"))
    check_interpreter(etl.pythons("pyspark.daemon")[0], shell.hadoop)
    code, output = etl.ended()
    assert code == 0, output[-6000:]
    dataset = f"{shell.hadoop.hdfs_url}/cluster/dataset"
    assert load_dataset(dataset).counts.read == 3_000 and verify(dataset) == []
    assert f"{dataset}: 3000 read, " in etl.printed


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_training_in_cluster_mode_survives_its_application_master_and_errors_are_in_the_diagnostics(
    shell: Shell,
) -> None:
    """All in one test, since YARN unpacks an archive of 19,000 files once."""
    shell.package(*KINDS)
    fs, home = filesystem(shell.hadoop.hdfs_url), shell.hadoop.hdfs_url
    etl = shell.submit("etl_logs.py", ("$LOCKSTEP_ETL", "$LOCKSTEP_TRAINING"))
    code, output = etl.ended()
    assert code == 0, output[-6000:]

    training = shell.submit("train.py", ("--epochs 2", "--epochs 40 --checkpoint-every 20"))
    check_interpreter(training.pythons("pyspark.daemon")[0], shell.hadoop)
    for rank in (ranks := training.pythons("lockstep.training.rank")):
        check_interpreter(rank, shell.hadoop)
    checkpoints = RunPaths(f"{home}/cluster/run").checkpoints
    until(lambda: fs.exists(checkpoints) and fs.list(checkpoints), LIMIT_S)
    (driver,) = training.pythons("train.py")
    master = driver.parent()
    assert master is not None and "java" in master.exe()
    master.kill()
    code, output = training.ended()
    assert code == 0, output[-6000:]
    run = f"{home}/cluster/run"
    result = find_result(fs, RunPaths(run))
    records = load_dataset(f"{home}/cluster/dataset").splits["train"].records
    assert result is not None and result["steps"] == 40 * records // 128
    claims = read_claims(fs, RunPaths(run))
    assert len(claims) == 2 and claims[2].parent is not None, "the second driver began with a checkpoint of the first"
    assert check_run_audit(run).ok and verify(run) == [] and ranks
    assert f"{run}: {result['steps']} steps, 40 epochs" in training.printed

    before = shell.submit("etl_logs.py", ("80/20", "nonsense"))  # the error comes before a Spark session
    code, output = before.ended()
    assert code == 1
    diagnostics = output[output.index("Application diagnostics message") :]
    assert "error: --split cannot be read\n  got: group:visitor:nonsense\n  allowed: " in diagnostics
    assert "User application exited with status 2" in diagnostics and "error: --split" in before.printed

    with fs.create(f"{home}/weblog/garbage/log") as writer:
        writer.write(b"no line of a log\n" * 100)
    within = shell.submit("etl_logs.py", ("weblog/raw", "weblog/garbage"), ("cluster/dataset", "cluster/other"))
    code, output = within.ended()
    assert code == 1
    diagnostics = output[output.index("Application diagnostics message") :]
    assert diagnostics.startswith(
        "Application diagnostics message: exit code 2\n"
        "error: 100 of 100 records are bad, more than --max-bad allows\n  got: "
    )
    assert "\n  next: " in diagnostics and "error: 100 of 100" in within.printed
