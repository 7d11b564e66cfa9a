"""The examples that need a cluster: their READMEs' commands as they stand, on the real HDFS and YARN of this folder."""

from __future__ import annotations

import uuid
from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

import lockstep
from lockstep.storage.fs import filesystem
from lockstep.storage.settings import set_hadoop_settings
from tests.cluster.daemons import Cluster
from tests.examples.test_gallery import number, ran, train_and_test

pytestmark = pytest.mark.slow


def on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set what `.cluster/env.sh` sets; returns the address of a new folder on HDFS, in which the results will be."""
    url = f"{cluster.hdfs_url}/{uuid.uuid4().hex}"
    for name, value in {**cluster.env, "HDFS": url, "YARN": " ".join(cluster.submit_conf)}.items():
        monkeypatch.setenv(name, value)
    set_hadoop_settings({})  # HADOOP_CONF_DIR is read again
    return url


def test_pictures_are_sent_to_hdfs_trained_on_and_evaluated(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = on(hadoop, monkeypatch)
    printed = ran("cifar", tmp_path)
    raw = tmp_path / ".demo" / "cifar" / "raw"
    seen, labels = (pd.Series([*(raw / name).read_bytes()[::3073]]) for name in ("data_batch_1.bin", "test_batch.bin"))
    assert lockstep.read_manifest(f"{url}/cifar/dataset").splits["test"].records == len(labels) == 400
    baseline = number(r"\naccuracy +\S+ +\S+ to \S+ +(\S+)", printed)
    assert baseline == pytest.approx((labels == seen.mode()[0]).mean(), abs=6e-5)
    assert number(r"\naccuracy +(\S+)", printed) > baseline + 0.1
    filesystem(url).delete(url, recursive=True)


def test_ranks_in_containers_of_yarn_have_the_auc_of_scikit_learn(
    hadoop: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = on(hadoop.start_yarn(), monkeypatch)
    printed = ran("yarn", tmp_path)
    _, rows = train_and_test(tmp_path / ".demo" / "yarn" / "visits")
    outputs = lockstep.predict(f"{url}/shop/run", rows[["country", "device", "pages", "seconds"]])
    assert number(r"\nauc +(\S+)", printed) == pytest.approx(roc_auc_score(rows["bought"], outputs.ravel()), abs=6e-5)
    filesystem(url).delete(url, recursive=True)
