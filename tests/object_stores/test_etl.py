"""Datasets from S3 to S3 by tasks of Spark, without a jar of Hadoop, and what reads them there."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lockstep.etl.images import job as images
from lockstep.etl.images.config import ImagesConfig
from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.etl.tables import TableConfig
from lockstep.etl.tables import frame as frame_of
from lockstep.etl.write.staging import Staging, clean
from lockstep.features.schema.schema import Columns, foreign_field
from lockstep.jobs.index import main as index
from lockstep.jobs.upload import main as upload
from lockstep.storage.errors import ConfigError, ExistsError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.formats.tfrecord import frame
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.publish import write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.reading.open import OpenSplit
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.builders.blocks import read_all
from tests.builders.records import encode_example
from tests.cluster.test_jobs import cut_log
from tests.object_stores.server import SECRET, ObjectServer
from tests.training._ranks import living_ranks
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def names_and_digests(url: str) -> dict[str, bytes]:
    """The files of a dataset but for the manifest, which names the sources."""
    fs = filesystem(url)
    files = [entry.url for entry in walk(fs, url) if entry.name != "_manifest.json"]
    return {file.removeprefix(f"{url}/"): fs.read_bytes(file) for file in files}


@pytest.fixture
def keys_of_spark(s3: ObjectServer) -> Iterator[None]:
    """Credentials among Spark's settings: the session's workers have the environment of before."""
    names = {"fs.s3a.access.key": "AWS_ACCESS_KEY_ID", "fs.s3a.secret.key": "AWS_SECRET_ACCESS_KEY"}
    set_hadoop_settings({key: s3.environment[name] for key, name in names.items()})
    yield
    set_hadoop_settings({})


@pytest.mark.usefixtures("keys_of_spark")
def test_arrays_are_uploaded_and_become_a_dataset_there(spark: SparkSession, root: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (90, 6, 6, 3), dtype=np.uint8), rng.integers(0, 3, 90)
    np.savez(tmp_path / "cifar.npz", x_train=x, y_train=y)
    np.save(tmp_path / "x_train.npy", x)
    assert upload(["--input", *(str(tmp_path / name) for name in ("cifar.npz", "x_train.npy")), "--output", root]) == 0
    fs = filesystem(root)
    assert np.array_equal(np.load(io.BytesIO(fs.read_bytes(join(root, "x_train.npy"))), allow_pickle=False), x)
    with np.load(io.BytesIO(fs.read_bytes(join(root, "cifar.npz"))), allow_pickle=False) as stored:
        assert np.array_equal(stored["x_train"], x) and np.array_equal(stored["y_train"], y)
    config = ImagesConfig(
        source="npz", inputs=(join(root, "cifar.npz"),), output=join(root, "data"), split="given", fmt="parquet",
        num_classes=3,
    )  # fmt: skip
    images.run(spark, config)
    assert verify(config.output) == []
    encoded = OpenSplit.at(config.output, "train")
    rows = encoded.encoder.encode(read_all(encoded.reader))
    assert rows.y is not None
    found = sorted((int(label), image.tobytes()) for label, image in zip(rows.y, rows.x["image"], strict=True))
    assert found == sorted((int(label), image.tobytes()) for label, image in zip(y, x, strict=True))


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("keys_of_spark")
def test_a_log_becomes_the_dataset_that_a_disk_has_and_trains_through_a_killed_rank(
    spark: SparkSession, root: str, tmp_path: Path
) -> None:
    log = cut_log(tmp_path / "access.log", 1_500)
    assert upload(["--input", log, "--output", join(root, "raw")]) == 0
    here, there = str(tmp_path / "dataset"), join(root, "dataset")
    local = logs.run(spark, LogsConfig(inputs=(log,), output=here, split="group:visitor:80/20"))
    config = LogsConfig(inputs=(join(root, "raw", "access.log"),), output=there, split="group:visitor:80/20")
    manifest = logs.run(spark, config)
    assert manifest.digest == local.digest and names_and_digests(there) == names_and_digests(here)
    assert verify(there) == []
    assert [entry.name for entry in filesystem(root).list(root)] == ["dataset", "raw"]
    with pytest.raises(ExistsError):
        logs.run(spark, config)

    run = join(root, "run")
    command = [
        sys.executable, "-m", "lockstep", "train", "--dataset", there, "--run", run, "--model", "logistic",
        "--num-ranks", "2", "--global-batch", "16", "--epochs", "12", "--checkpoint-every", "20",
        "--launcher", "local", "--validate", "test",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        fs, paths, end = filesystem(run), RunPaths(run), time.monotonic() + WAIT_S
        while not fs.exists(paths.checkpoints):
            assert driver.poll() is None, driver.communicate()[0][-6000:]
            assert time.monotonic() < end, "no checkpoint on S3"
            time.sleep(0.2)
        os.kill(living_ranks(driver.pid)[1], signal.SIGKILL)
        said = driver.communicate(timeout=WAIT_S)[0]
    assert driver.returncode == 0, said[-6000:]
    result = find_result(fs, paths)
    assert result is not None and result["restarts"] == 1 and verify(run) == []
    stored = {entry.url: fs.read_bytes(entry.url) for entry in walk(fs, root)}
    assert not [url for url, data in stored.items() if SECRET.encode() in data]


def test_files_of_others_are_indexed_where_they_are(fs: FileSystem, root: str) -> None:
    schema = Columns((foreign_field("n", "int64", False),))
    records = [frame(encode_example(schema, {"n": number})) for number in range(20)]
    write_file(fs, join(root, "x.tfrecord"), b"".join(records))
    assert index([root]) == 0
    assert [entry.url.removeprefix(f"{root}/") for entry in walk(fs, root)] == [
        "_index/x.tfrecord.idx", "_manifest.json", "x.tfrecord",
    ]  # fmt: skip
    assert verify(root) == []


def test_a_staging_folder_of_a_dead_job_is_cleaned_and_its_job_publishes_nothing(fs: FileSystem, root: str) -> None:
    output = join(root, "dataset")
    with Staging(output) as staging:
        write_file(fs, join(staging.root, "split=train", "part-00000.tfrecord"), b"x")
        now_ms = staging.signed_ms() + 700_000
        assert [found.url for found in clean(fs, output, now_ms)] == [staging.root]
        assert not fs.exists(staging.root)
        with pytest.raises(StorageError, match="was removed while this job used it"):
            staging.publish(b"{}")
    assert not fs.exists(root)


def test_a_table_on_s3_needs_sparks_own_file_system_and_says_so(spark: SparkSession, fs: FileSystem, root: str) -> None:
    write_file(fs, join(root, "t.parquet"), b"PAR1")
    config = TableConfig(inputs=(join(root, "t.parquet"),), output=join(root, "out"), id_columns=("id",))
    with pytest.raises(ConfigError, match="no file system for their URLs"):
        frame_of(spark, config)
