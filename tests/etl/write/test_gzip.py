"""Datasets with gzip shards: written by jobs, and read by whoever reads gzip."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.etl.describe.dataset import describe
from lockstep.etl.write.append import ids_of
from lockstep.etl.write.config import WriteConfig
from lockstep.etl.write.dataset import write_dataset
from lockstep.jobs import etl_table
from lockstep.storage.dataset.layout import Compression
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError
from lockstep.storage.verify import verify
from tests.etl.conftest import tree
from tests.storage.repacked import repacked
from tests.training._tiny import write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "gzip", "fmt": "parquet"}, "--format tfrecord"),
        ({"compression": "zlib"}, "none or gzip"),
        ({"compression": ""}, "none or gzip"),
    ],
)
def test_what_cannot_be_packed(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="--compression") as caught:
        WriteConfig(output="/x", **options)
    assert caught.value.allowed == told


def test_the_flag_reaches_the_job() -> None:
    flags = ["--table", "t", "--id-columns", "k", "--output", "/x", "--compression", "gzip"]
    assert etl_table.config_of(etl_table.parser().parse(flags)).compression == "gzip"


def test_sample_ids_are_those_of_the_unpacked_shards(tmp_path: Path) -> None:
    plain = write_table(tmp_path / "plain").splits["train"].shards
    packed = repacked(tmp_path / "plain", tmp_path / "d").splits["train"].shards
    for one, other in zip(plain, packed, strict=True):
        wanted = list(ids_of(str(tmp_path / "plain" / one.path), one))
        assert list(ids_of(str(tmp_path / "d" / other.path), other)) == wanted


@pytest.mark.slow
def test_a_packed_dataset_is_the_plain_one_to_every_reader(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(1500).selectExpr("id", "id % 7 AS page", "concat('word', id % 90) AS word", "id % 3 = 0 AS hit")

    def write(name: str, tasks: int, compression: Compression) -> DatasetManifest:
        url, df = str(tmp_path / name), rows.coalesce(tasks)
        return write_dataset(
            df, url, id_columns=("id",), label="hit", shard_bytes=45_000, split="50/50", compression=compression
        )

    plain, packed = write("plain", 2, "none"), write("gz", 1, "gzip")
    again = repacked(tmp_path / "plain", tmp_path / "again")
    assert packed.splits == again.splits and packed.compression == "gzip"
    written, shards = tree(tmp_path / "gz"), [shard.path for split in packed.splits.values() for shard in split.shards]
    assert sorted(written) == sorted(["_manifest.json", *shards]) and len(shards) == 4  # as many as without compression
    for path in shards:
        assert written[path] == (tmp_path / "again" / path).read_bytes()
        unpacked = (tmp_path / "plain" / path.removesuffix(".gz")).read_bytes()
        assert gzip.decompress(written[path]) == unpacked
        assert _by_hadoop(spark, tmp_path / "gz" / path) == unpacked
        assert _by_tensorflow(tmp_path / "gz" / path, "GZIP") == _by_tensorflow(
            tmp_path / "plain" / path.removesuffix(".gz"), ""
        )
    assert verify(str(tmp_path / "gz")) == []
    facts = describe(str(tmp_path / "gz")).tables[0].rows
    total = sum(shard.bytes for split in plain.splits.values() for shard in split.shards)
    assert ("format", "tfrecord, gzip") in facts and facts[-1][1].startswith(f"{total} ")

    reading = spark.read.format("tfrecord").option("partitionBytes", 20_000).option("columns", "id,page,word,hit")
    frame = reading.load(str(tmp_path / "gz"))
    assert frame.rdd.getNumPartitions() == 8 and sorted(frame.collect()) == sorted(rows.collect())


def _by_hadoop(spark: SparkSession, path: Path) -> bytes:
    """What Hadoop's codec of the file's name unpacks it to."""
    jvm: Any = spark.sparkContext._jvm
    hadoop = jvm.org.apache.hadoop
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    place = hadoop.fs.Path(str(path))
    codec = hadoop.io.compress.CompressionCodecFactory(conf).getCodec(place)
    out = jvm.java.io.ByteArrayOutputStream()
    hadoop.io.IOUtils.copyBytes(codec.createInputStream(place.getFileSystem(conf).open(place)), out, 4096, True)
    return bytes(out.toByteArray())


def _by_tensorflow(path: Path, compression: str) -> list[bytes]:
    import tensorflow as tf

    return list(tf.data.TFRecordDataset(str(path), compression_type=compression).as_numpy_iterator())
