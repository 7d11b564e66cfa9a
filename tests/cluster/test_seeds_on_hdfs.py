"""examples/seeds on a real HDFS: files by InsecureClient, a dataset of them, a ResNet in the roles train and eval."""

from __future__ import annotations

import gzip
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lockstep
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join
from lockstep.training.results.follow import followed
from lockstep.training.run.lineage import chain_of
from lockstep.training.run.paths import RunPaths
from tests.cluster.daemons import Cluster
from tests.lockstep.test_seeds import script, threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORD, COUNT = 1 + 3072, 400  # bytes of a record of CIFAR-10's binary version: a class, three planes of 32 x 32


def garments_as_cifar(folder: Path) -> Path:
    """The first pictures of data/fashion-mnist in CIFAR-10's layout: grey, with a margin of two pixels."""
    import numpy as np

    from tests.lockstep.test_seeds import pictures

    images, labels = pictures("train", COUNT)
    planes = np.repeat(np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None], 3, axis=1).reshape(COUNT, 3072)
    path = folder / "data_batch_1.bin"
    path.write_bytes(np.concatenate([labels[:, None], planes], axis=1).tobytes())
    return path


def cifar(shared_data: Path, folder: Path) -> Path:
    """The first records of CIFAR-10 itself."""
    path = folder / "data_batch_1.bin"
    with gzip.open(shared_data / "cifar10" / "data_batch_1_first4000.bin.gz") as file:
        path.write_bytes(file.read(COUNT * RECORD))
    return path


@pytest.mark.parametrize("source", ["garments", pytest.param("cifar10", marks=pytest.mark.shared_data)])
def test_pictures_are_sent_trained_on_and_scored(
    source: str, hadoop: Cluster, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in hadoop.env.items():
        monkeypatch.setenv(name, value)
    set_hadoop_settings({})  # forget an earlier test's session: HADOOP_CONF_DIR is read again
    monkeypatch.setattr("lockstep.training.launch.local.run_local", threads)
    file = (
        cifar(request.getfixturevalue("shared_data"), tmp_path) if source == "cifar10" else garments_as_cifar(tmp_path)
    )
    folder = f"/seeds-{uuid.uuid4().hex}"
    root = join(hadoop.hdfs_url, folder.strip("/"))

    namenode = f"http://127.0.0.1:{hadoop.ports['namenode-http']}"
    flags = ["--namenode", namenode, "--input", str(file), "--output", folder]
    sent = script("upload.py", *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert sent == f"{folder}/data_batch_1.bin: {COUNT * RECORD} bytes, as sent"

    dataset, run = join(root, "dataset"), join(root, "run")
    manifest = lockstep.write_images(spark, join(root, "data_batch_1.bin"), dataset, source="cifar10", split="80/20")
    assert (manifest.counts.written, manifest.counts.quarantined) == (COUNT, 0)

    flags = ["--dataset", dataset, "--run", run, "--model", "resnet8", "--epochs", "3"]
    trained = script("resnet.py", "train", *flags, monkeypatch=monkeypatch, capsys=capsys)
    steps = 3 * manifest.splits["train"].records // 128
    assert trained == f"trained {steps} steps"
    script("resnet.py", "eval", *flags, monkeypatch=monkeypatch, capsys=capsys)
    (scores,) = followed(filesystem(run), RunPaths(run)).values()
    kept, _ = chain_of(filesystem(run), RunPaths(run))  # a checkpoint that is due while another is written is left out
    assert list(scores) == sorted(ref.step for ref in kept) and max(scores) == steps
    assert all("accuracy" in each for each in scores.values())
    filesystem(root).delete(root, recursive=True)
