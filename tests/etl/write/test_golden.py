"""Bytes of datasets that must not change: rows of every kind, written in several shards."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.dataset import write_dataset
from lockstep.etl.write.quarantine import Origin
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.layout import Format
from lockstep.storage.dataset.manifest_entries import SourceInfo
from tests.etl.conftest import large_offsets, tree

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema(
    (
        sample_id_field(),
        Field(name="label", dtype="bool", kind="label"),
        Field(name="count", dtype="int64", nullable=True, encoding={"kind": "bucketise", "boundaries": [0]}),
        Field(name="real", dtype="float32"),
        Field(name="wide", dtype="float64"),
        Field(name="word", dtype="string"),
        Field(name="words", dtype="string", shape=(None,)),
        Field(name="numbers", dtype="int64", shape=(None,)),
        Field(name="image", dtype="uint8", shape=(3, 2, 1)),
    )
)
DDL = (
    "label boolean, count bigint, real float, wide double, word string, words array<string>, numbers array<bigint>,"
    " image binary, _source int, _position bigint, _occurrence bigint"
)
# Made by the plain encoder, before there were kernels.
GOLDEN = {
    "tfrecord": "f9929d2414b90d0a5fbd00144c179826788c71d6cd804bc99e6d735468556d24",
    "parquet": "3c10078191fdc5d57ef7e45a85c775dd0dc1c7c312687b87c12da5de3d258260",
}


def row(number: int) -> tuple[Any, ...]:
    words = [f"w{n}" * n for n in range(number % 4)]
    numbers = [(-7) ** n * number for n in range(number % 6)]
    word, image = "é" * (number % 90), bytes(range(number % 200, number % 200 + 6))
    count = None if number % 5 == 0 else (number - 100) << (number % 40)
    return (number % 3 == 0, count, number / 8, number / 7, word, words, numbers, bytearray(image), 0, number, number)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "large"), [("tfrecord", False), ("parquet", False), ("tfrecord", True)])
def test_shards_and_indexes_are_these_bytes(spark: SparkSession, tmp_path: Path, fmt: Format, large: bool) -> None:
    df = spark.createDataFrame([row(number) for number in range(300)], DDL)
    with large_offsets(spark) if large else nullcontext():
        write_dataset(
            df,
            str(tmp_path / "out"),
            schema=SCHEMA,
            id_columns=("word", "wide"),
            fmt=fmt,
            split=SplitSpec.parse("80/20"),
            shard_bytes=20_000,
            seed=3,
            origin=Origin(sources=(SourceInfo("in.csv", 1, "0" * 64),), read=300),
        )
    digest = hashlib.sha256()
    for path, data in sorted(tree(tmp_path / "out").items()):
        if path != "_manifest.json":
            digest.update(f"{path} {hashlib.sha256(data).hexdigest()}\n".encode())
    assert digest.hexdigest() == GOLDEN[fmt]
