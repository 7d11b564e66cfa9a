"""From IDX files to a published dataset, on Spark."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from lockstep.etl.images import job
from lockstep.etl.images.config import ImagesConfig
from lockstep.features.examples import decode_batch
from lockstep.features.images.resize import resize
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError
from lockstep.storage.formats.tfrecord import parse_records
from lockstep.storage.verify import verify
from tests.etl.conftest import tree, write_images

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def config(folder: Path, output: Path, **more: Any) -> ImagesConfig:
    told = {"inputs": (str(folder),), "output": str(output), "split": "given", "fmt": "parquet", "num_classes": 3}
    return ImagesConfig(**{**told, **more})


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idx")
    write_images(folder, "train", 200, bad_labels=(7,))
    write_images(folder, "t10k", 50)
    return folder


@pytest.fixture(scope="module")
def published(
    spark: SparkSession, images: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DatasetManifest]:
    output = tmp_path_factory.mktemp("images") / "dataset"
    return output, job.run(spark, config(images, output))


def test_counts_splits_and_pixels(published: tuple[Path, DatasetManifest]) -> None:
    folder, manifest = published
    assert (manifest.counts.read, manifest.counts.written, manifest.counts.quarantined) == (250, 249, 1)
    assert {name: split.records for name, split in manifest.splits.items()} == {"train": 199, "test": 50}
    schema = Schema.from_json(manifest.schema)
    assert schema["image"].shape == (6, 4, 1) and schema["label"].num_classes == 3
    rows = pq.ParquetFile(folder / "split=test/part-00000.parquet").read().to_pylist()
    pixels = {row["image"]: row["label"] for row in rows}
    every = (np.arange(50 * 24) % 251).astype(np.uint8).reshape(50, 24)
    assert pixels == {image.tobytes(): number % 3 for number, image in enumerate(every)}
    assert not list(verify(str(folder)))


def test_a_row_group_is_a_block(published: tuple[Path, DatasetManifest]) -> None:
    folder, manifest = published
    split = manifest.splits["train"]
    file = pq.ParquetFile(folder / split.shards[0].path)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert len(sizes) == len(split.shards[0].block_offsets) and set(sizes[:-1]) == {split.block_records}


def test_the_manifest_has_the_digest_of_each_footer(published: tuple[Path, DatasetManifest]) -> None:
    folder, manifest = published
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        data = (folder / shard.path).read_bytes()
        footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
        assert shard.footer_sha256 == hashlib.sha256(footer).hexdigest()


def test_a_label_out_of_range_is_quarantined_with_its_place(
    published: tuple[Path, DatasetManifest], images: Path
) -> None:
    (row,) = pq.read_table(published[0] / "_quarantine" / "part-00000.parquet").to_pylist()
    source = images / "train-labels-idx1-ubyte"
    assert (row["source"], row["position"], row["reason"]) == (str(source), 8 + 7, "label_out_of_range")
    assert row["raw"] == b"\x09" == source.read_bytes()[15:16]


def test_the_same_bytes_however_files_lie_and_are_cut(
    spark: SparkSession, published: tuple[Path, DatasetManifest], images: Path, tmp_path: Path
) -> None:
    job.run(spark, config(images, tmp_path / "cut", split_bytes=60 * 24))
    assert tree(tmp_path / "cut") == tree(published[0])
    packed = tmp_path / "elsewhere"
    packed.mkdir()
    for path in images.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    manifest = job.run(spark, config(packed, tmp_path / "packed"))
    assert manifest.digest == published[1].digest


def test_resized_tfrecords_by_hash(spark: SparkSession, images: Path, tmp_path: Path) -> None:
    told = config(images, tmp_path / "out", fmt="tfrecord", split="80/20", image_size=(3, 5))
    manifest = job.run(spark, told)
    schema = Schema.from_json(manifest.schema)
    assert schema["image"].shape == (3, 5, 1)
    found = set()
    for split in manifest.splits.values():
        for shard in split.shards:
            data = (tmp_path / "out" / shard.path).read_bytes()
            found |= {row["image"] for row in decode_batch(schema, parse_records(data, file=shard.path)).to_pylist()}
    every = (np.arange(50 * 24) % 251).astype(np.uint8).reshape(50, 6, 4, 1)
    assert {image.tobytes() for image in resize(every, 3, 5)} <= found
    assert 30 < manifest.splits["test"].records < 70


def test_wrong_input_publishes_nothing(spark: SparkSession, images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 of 250 records are bad"):
        job.run(spark, config(images, tmp_path / "out", max_bad="0.1%"))
    assert len(pq.read_table(tmp_path / "_quarantine-out")) == 1
    shutil.rmtree(tmp_path / "_quarantine-out")
    folder = tmp_path / "in"
    folder.mkdir()
    write_images(folder, "train", 20, packed=True)
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))
    with pytest.raises(DataError, match="wrong length") as caught:
        job.run(spark, config(folder, tmp_path / "out"))
    assert (caught.value.got, str(path) in caught.value.what) == ("491 bytes", True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
