"""Jobs on an HDFS as sites have it: NameNodes that fail over under ETL and training."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.verify import verify
from tests.cluster.sites import Site
from tests.cluster.test_jobs import cut_log, ended, job
from tests.waiting import until
from training.results.audit import check_run_audit
from training.run.paths import RunPaths
from training.run.result import find_result

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
WAIT_S = 600.0
TRAIN = (
    "--model", "logistic", "--num-ranks", "2", "--global-batch", "16", "--epochs", "6", "--checkpoint-every", "40",
    "--audit", "--validate", "test", "--launcher", "barrier", "--master", "local[2]",
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A name service of its own, as this process and its children see it."""
    site = Site(tmp_path / "site")
    try:
        site.start_hdfs()
        for name, value in site.env.items():
            monkeypatch.setenv(name, value)
        set_hadoop_settings({})
        yield site
    finally:
        site.stop()


def appears(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until `url` has entries."""
    fs = filesystem(url)
    until(lambda: process.poll() is not None or (fs.exists(url) and fs.list(url)), WAIT_S)
    assert process.poll() is None, process.communicate()[0][-6000:]


def check_run(run: str, dataset: str, epochs: int, global_batch: int) -> None:
    """The run ended in one generation, used each record once an epoch, and every byte of both is right."""
    result = find_result(filesystem(run), RunPaths(run))
    assert result is not None and result["restarts"] == 0
    records = load_dataset(dataset).splits["train"].records
    assert result["steps"] == epochs * records // global_batch
    report = check_run_audit(run)
    assert report.ok and len(report.left_over) == epochs * records % global_batch, report
    assert verify(run) == verify(dataset) == []


def test_namenode_dies_under_etl_and_freezes_under_training(site: Site, tmp_path: Path) -> None:
    """Both fail over to the other NameNode, at no cost but time."""
    root = f"{site.hdfs_url}/weblog"
    raw, dataset, run = f"{root}/raw", f"{root}/dataset", f"{root}/run"
    ended(job("upload", "--input", cut_log(tmp_path / "access.log", 8_000), "--output", raw, folder=tmp_path))

    etl = job("etl_logs", "--input", raw, "--output", dataset, "--split", "group:visitor:80/20",
              "--master", "local[2]", folder=tmp_path)  # fmt: skip
    fs = filesystem(root)
    until(lambda: etl.poll() is not None or len(fs.list(root)) > 1, WAIT_S)  # its staging folder
    assert etl.poll() is None, etl.communicate()[0][-6000:]
    site.kill(site.active())
    site.fail_over()
    assert "8000 read" in ended(etl)
    assert load_dataset(dataset).counts.read == 8_000
    site.heal()

    training = job("train", "--dataset", dataset, "--run", run, *TRAIN, folder=tmp_path)
    appears(RunPaths(run).checkpoints, training)
    site.pause(site.active())
    site.fail_over()
    ended(training)
    check_run(run, dataset, epochs=6, global_batch=16)
