"""Petastorm between Spark and TensorFlow: a converted DataFrame, our dataset, and a dataset that Petastorm wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lockstep.etl.petastorm.metadata import tensors, write_petastorm_metadata
from lockstep.etl.write.dataset import write_dataset
from lockstep.features.schema.schema import Schema
from lockstep.petastorm import enable
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import verify
from tests.training._tiny import write_images

enable()

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def test_a_data_frame_becomes_a_tensorflow_dataset(spark: SparkSession, tmp_path: Path) -> None:
    from petastorm.spark import SparkDatasetConverter, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}")
    frame = spark.range(50).selectExpr("id + 1152921504606846976 AS id", "id / 3D AS share", "concat('é', id) AS name")
    converter = make_spark_converter(frame, dtype=None)
    assert len(converter) == 50 and make_spark_converter(frame, dtype=None).cache_dir_url == converter.cache_dir_url
    found: dict[int, Any] = {}
    with converter.make_tf_dataset(batch_size=8, num_epochs=1, workers_count=1) as dataset:
        for batch in dataset:
            assert len(batch.id) <= 8
            found |= dict(zip(batch.id.numpy(), zip(batch.share.numpy(), batch.name.numpy(), strict=True), strict=True))
    assert found == {row.id: (row.share, row.name.encode()) for row in frame.collect()}
    converter.delete()
    assert list(tmp_path.iterdir()) == []


def test_our_dataset_reads_the_same_in_spark_and_tensorflow(spark: SparkSession, tmp_path: Path) -> None:
    from petastorm import make_reader
    from petastorm.tf_utils import make_petastorm_dataset

    manifest = write_images(str(tmp_path / "set"), records={"train": 24, "test": 8}, fmt="parquet")
    plain = spark.read.parquet(str(tmp_path / "set"))
    schema, rows = plain.schema, {row.sample_id: row for row in plain.where("split = 'train'").collect()}
    declared = Schema.from_json(manifest.schema)
    write_petastorm_metadata(filesystem(str(tmp_path)), str(tmp_path / "set"), declared, manifest.splits)
    after = spark.read.parquet(str(tmp_path / "set"))
    assert after.schema == schema and after.count() == 32, "Spark takes the schema from _common_metadata"
    found: dict[int, Any] = {}
    with make_reader(f"file://{tmp_path}/set/split=train", workers_count=1, transform_spec=tensors(declared)) as reader:
        for batch in make_petastorm_dataset(reader).batch(10):
            assert batch.image.shape[1:] == (8, 8, 1) and batch.image.dtype == np.uint8
            for sample, image, label in zip(batch.sample_id, batch.image, batch.label, strict=True):
                found[int(sample)] = (image.numpy().tobytes(), int(label))
    assert found == {key: (bytes(row.image), row.label) for key, row in rows.items()}


def test_the_flag_makes_datasets_that_make_reader_and_verify_know(spark: SparkSession, tmp_path: Path) -> None:
    from petastorm import make_reader

    url, rows = str(tmp_path / "set"), spark.range(40).selectExpr("id", "id * 2 AS twice")
    with pytest.raises(ConfigError, match="--petastorm"):
        write_dataset(rows, url, id_columns=["id"], petastorm=True)
    write_dataset(rows, url, id_columns=["id"], fmt="parquet", split="1/1", petastorm=True)
    assert verify(url) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "supports reading only Petastorm datasets"
        with make_reader(f"file://{url}", workers_count=1) as reader:
            assert sorted((row.id, row.twice) for row in reader) == [(n, 2 * n) for n in range(40)]
    path = tmp_path / "set" / "_common_metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert [finding.path for finding in verify(url)] == ["_common_metadata"]
