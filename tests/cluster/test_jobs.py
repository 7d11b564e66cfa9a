"""The jobs on a real HDFS and YARN: from raw log and images to a trained, evaluated and verified run."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.verify import verify
from lockstep.training.launch.executors import RANK_MIB, container_of
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.cluster.daemons import Cluster
from tests.training._ranks import living_ranks
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "data" / "weblogs" / "nasa_access_log_1995-07-09.log.gz"
IDX = ROOT / "data" / "fashion-mnist"
WAIT_S = 900.0


@pytest.fixture
def on_hdfs(hadoop: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster as this process and its children see it."""
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    set_hadoop_settings({})  # forget what an earlier test's session handed over; HADOOP_CONF_DIR is read anew
    yield hadoop


def job(name: str, *flags: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"lockstep.jobs.{name}", *flags],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output[-6000:]
    return output


def cut_log(target: Path, lines: int) -> str:
    with gzip.open(LOG) as whole:
        target.write_bytes(b"".join(line for line, _ in zip(whole, range(lines), strict=False)))
    return str(target)


def ranks_in_containers(pid: int) -> list[psutil.Process]:
    """The ranks below a process; none is forked, since a container counts memory."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "lockstep.training.rank" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue  # ended between the two calls
    return found


def shared_bytes(rank: psutil.Process) -> list[int]:
    """The sizes of a rank's maps of shared memory."""
    ends = [found.addr.split("-") for found in rank.memory_maps(grouped=False) if "memfd:lockstep" in found.path]
    return [int(stop, 16) - int(start, 16) for start, stop in ends]


@pytest.mark.soak  # `make test` runs docs/cluster.md on YARN, kills ranks on local disks and daemons under a run
@pytest.mark.timeout(2400)
def test_web_log_on_hdfs_through_a_killed_rank(spark: SparkSession, on_hdfs: Cluster, tmp_path: Path) -> None:
    """ETL by this worker's session, ranks of this host; spark-submit and barrier stages work on YARN below."""
    dataset, run = f"{on_hdfs.hdfs_url}/weblog/dataset", f"{on_hdfs.hdfs_url}/weblog/run"
    log = cut_log(tmp_path / "access.log", 8_000)
    manifest = logs.run(spark, LogsConfig(inputs=(log,), output=dataset, split="group:visitor:80/20"))
    assert manifest.counts.read == 8_000 and verify(dataset) == []

    training = job(
        "train", "--dataset", dataset, "--run", run, "--model", "logistic", "--num-ranks", "2", "--audit",
        "--global-batch", "16", "--epochs", "6", "--checkpoint-every", "40", "--launcher", "local",
        "--validate", "test", folder=tmp_path,
    )  # fmt: skip
    fs, paths = filesystem(run), RunPaths(run)
    deadline = time.monotonic() + WAIT_S
    while not (fs.exists(paths.checkpoints) and fs.list(paths.checkpoints)):
        assert training.poll() is None, training.communicate()[0][-6000:]
        assert time.monotonic() < deadline, "no checkpoint on HDFS"
        time.sleep(0.2)
    victims = [psutil.Process(pid) for pid in living_ranks(training.pid)]
    assert len(victims) == 2, [process.cmdline() for process in victims]
    sizes = shared_bytes(victims[1])  # of all ranks together, and of a group of them; some MiB are in use
    assert len(sizes) == 2 and max(sizes) < 200 << 20, sizes
    opened = [Path(file.path) for one in victims for file in one.open_files()]
    scratch = [path.parent for path in opened if path.parent.name.startswith("lockstep-rank-")]  # the locks of both
    assert len(scratch) == 2
    assert all(list(folder.glob("__autograph_generated_file*.py")) for folder in scratch)
    os.kill(victims[1].pid, signal.SIGKILL)
    told = ended(training)
    assert not any(folder.exists() for folder in scratch)

    result = find_result(fs, paths)
    assert result is not None, told
    assert result["restarts"] == 1 and result["generation"] == 2, told
    records = manifest.splits["train"].records
    assert result["steps"] == 6 * records // 16
    report = check_run_audit(run)
    assert report.ok, report
    assert len(report.left_over) == 6 * records % 16 == len(result["left_over"])
    assert verify(run) == []
    evaluation = ended(job("evaluate", "--run", run, "--dataset", dataset, "--json", folder=tmp_path))
    (found,) = (json.loads(line) for line in evaluation.splitlines() if line.startswith("{"))
    assert validations(run)[-1] == pytest.approx(found["metrics"], rel=1e-5) and len(validations(run)) == 6


def validations(run: str) -> list[dict[str, float]]:
    """The metrics of the validation split after each epoch."""
    rows = [row["metrics"] for row in read_history(run).epochs]
    return [{name.removeprefix("val_"): row[name] for name in row if name.startswith("val_")} for row in rows]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_cifar_batches_from_upload_to_evaluation_on_yarn(on_hdfs: Cluster, tmp_path: Path) -> None:
    """Uploaded, then ETL to evaluation in one session whose executors are YARN's, in client mode.

    A rank does not fit into executors of 512 MiB and Spark's own overhead; it does with the flag that says so. One is
    killed: validation finds what it finds in an undisturbed run on this host.
    """
    on_hdfs.start_yarn()
    small = container_of("yarn", {"spark.executor.memory": "512m", "spark.executor.instances": "2"}, 2, 256)
    assert small is not None and small.container_mib == 1024  # the cluster's containers come in steps of 256 MiB
    with pytest.raises(ConfigError, match="cannot fit into the memory") as refused:
        small.judge(RANK_MIB, "the rank of the smallest model")
    flag = re.search(r"--conf \S+m", refused.value.next_step)
    assert flag is not None, refused.value.next_step
    conf, raw = tmp_path / "images.toml", f"{on_hdfs.hdfs_url}/cifar-10-batches-bin"
    batches = cifar_batches(tmp_path / "batches", 600, 200)
    assert "2 sent" in ended(job("upload", "--input", *map(str, batches), "--output", raw, folder=tmp_path))
    conf.write_text(
        f"""
        [pipeline]
        name = "images"
        metric = "accuracy"
        at_least = 0.0
        [etl_images]
        source = "cifar10"
        input = ["{raw}"]
        split = "given"
        format = "parquet"
        [train]
        model = "resnet8"
        num_ranks = 2
        global_batch = 32
        epochs = 2
        checkpoint_every = 6
        validate = "test"
        audit = true
        [evaluate]
        split = "test"
        baseline = "majority"
        launcher = "barrier"
        """
    )
    log = tmp_path / "pipeline.log"  # a pipe that is read at the end may become full
    with log.open("w") as output:
        pipeline = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("spark-submit")), *on_hdfs.submit_conf,
                "--num-executors", "2", "--executor-memory", "512m", *flag[0].split(),
                str(ROOT / "jobs" / "pipeline.py"), "--config", str(conf), "--out", f"{on_hdfs.hdfs_url}/demo",
            ],
            cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    fs = filesystem(on_hdfs.hdfs_url)

    def checkpoints() -> list[str]:
        found = fs.list(f"{on_hdfs.hdfs_url}/demo") if fs.exists(f"{on_hdfs.hdfs_url}/demo") else []
        folders = [RunPaths(f"{folder.url}/images/run").checkpoints for folder in found]
        return [entry.name for folder in folders if fs.exists(folder) for entry in fs.list(folder)]

    until(lambda: pipeline.poll() is not None or checkpoints(), WAIT_S)
    victims = ranks_in_containers(on_hdfs.processes["nodemanager"].pid)
    assert len(victims) == 2, log.read_text()[-6000:]
    victims[1].kill()
    assert pipeline.wait(WAIT_S) == 0, log.read_text()[-6000:]
    (folder,) = fs.list(f"{on_hdfs.hdfs_url}/demo")
    dataset, run = f"{folder.url}/images/dataset", f"{folder.url}/images/run"
    assert load_dataset(dataset).splits["train"].records == 600
    result = find_result(fs, RunPaths(run))
    assert result is not None and result["restarts"] == 1
    flags = ("--num-ranks", "2", "--global-batch", "32", "--epochs", "2", "--validate", "test", "--launcher", "local")
    undisturbed = f"{folder.url}/undisturbed"
    ended(job("train", "--dataset", dataset, "--run", undisturbed, "--model", "resnet8", *flags, folder=tmp_path))
    for mine, other in zip(validations(run), validations(undisturbed), strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    report = check_run_audit(run)
    assert report.ok and len(report.left_over) == 2 * 600 % 32
    assert verify(run) == verify(dataset) == []
    (page,) = filesystem(run).list(f"{run}/reports")
    assert b"<svg" in filesystem(run).read_bytes(page.url)


def cifar_batches(folder: Path, train: int, test: int) -> list[Path]:
    """The first images of each split in the layout of CIFAR-10's official binary batches; returns their paths."""
    folder.mkdir()
    made = []
    for prefix, name, count in (("train", "data_batch_1.bin", train), ("t10k", "test_batch.bin", test)):
        pixels = gzip.decompress((IDX / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16 : 16 + count * 28 * 28]
        labels = gzip.decompress((IDX / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8 : 8 + count]
        records = np.zeros((count, 1 + 3 * 32 * 32), dtype=np.uint8)  # a class, then the red, green and blue plane
        records[:, 0] = np.frombuffer(labels, dtype=np.uint8)
        planes = records[:, 1:].reshape(count, 3, 32, 32)
        planes[:, :, 2:30, 2:30] = np.frombuffer(pixels, dtype=np.uint8).reshape(count, 1, 28, 28)
        path = folder / name
        path.write_bytes(records.tobytes())
        made.append(path)
    return made
