"""write_dataset: what holds whatever the rows are."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.etl import columns as c
from lockstep.etl.columns import logical_bytes
from lockstep.etl.spark.errors import SameIdError, from_text, to_wire
from lockstep.etl.split.assign import Assign
from lockstep.etl.split.sampling import Sampling
from lockstep.etl.split.splits import SplitSpec
from lockstep.etl.write.checks import refuse_existing
from lockstep.etl.write.dataset import write_dataset
from lockstep.etl.write.quarantine import Origin
from lockstep.etl.write.shards import ShardTable, block_records, plan_shards
from lockstep.etl.write.staging import SIGN_NAME, Staging
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.dataset.manifest_entries import SourceInfo
from lockstep.storage.errors import ConfigError, DataError, ExistsError
from lockstep.storage.verify import verify
from tests.etl.conftest import tree

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = Schema((sample_id_field(), Field(name="n", dtype="int64"), Field(name="s", dtype="string", shape=(None,))))


def batch(
    numbers: list[int], occurrences: list[int] | None = None, dropped: dict[int, str] | None = None
) -> pa.RecordBatch:
    count = len(numbers)
    return pa.RecordBatch.from_pydict(
        {
            "n": pa.array(numbers, pa.int64()),
            "s": pa.array([["x"] * (n % 3) for n in numbers], pa.list_(pa.string())),
            "key": [f"k{n}" for n in numbers],
            "group": [f"g{n % 7}" for n in numbers],
            "_source": pa.array([0] * count, pa.int32()),
            "_position": pa.array(range(count), pa.int64()),
            "_occurrence": pa.array(occurrences or [0] * count, pa.int64()),
            "_leak": pa.array([0] * count, pa.int64()),
            "_dropped": pa.array([(dropped or {}).get(n) for n in numbers], pa.string()),
        }
    )


def assign(split: str, fmt: str = "tfrecord", seed: int = 0) -> Assign:
    return Assign(SCHEMA, ("key",), SplitSpec.parse(split), seed, fmt)


def splits_of(rows: pa.RecordBatch) -> dict[int, str]:
    return dict(zip(rows.column("sample_id").to_pylist(), rows.column("_split").to_pylist(), strict=True))


@pytest.mark.parametrize("split", ["80/20", "group:group:80/20"])
def test_more_data_moves_no_sample(split: str) -> None:
    few, many = (splits_of(assign(split).rows(batch(list(range(n))))) for n in (500, 2000))
    assert {sample: many[sample] for sample in few} == few
    assert 0.1 < list(many.values()).count("test") / 2000 < 0.35
    other = splits_of(assign(split, seed=1).rows(batch(list(range(2000)))))
    assert other != many


def test_a_group_is_in_one_split() -> None:
    numbers = list(range(500))
    rows = assign("group:group:50/50").rows(batch(numbers))
    groups: dict[int, set[str]] = {}
    for number, split in zip(numbers, rows.column("_split").to_pylist(), strict=True):
        groups.setdefault(number % 7, set()).add(split)
    assert all(len(found) == 1 for found in groups.values()) and len(groups) == 7


def test_dropped_rows_keep_their_reason_alone() -> None:
    rows = assign("80/20", "parquet").rows(batch([1, 2, 3], dropped={2: "why"}))
    assert rows.column("_dropped").to_pylist() == [None, None, "why"]
    assert rows.column("sample_id").null_count == 1 and rows.column("n").to_pylist() == [1, 3, None]


@pytest.mark.parametrize("split", ["80/20", "8/1/1", "group:group:50/50"])
def test_sampling_leaves_out_records_of_the_training_split_only(split: str) -> None:
    whole = assign(split).rows(batch(list(range(2000))))
    sampling = replace(assign(split), sample=Sampling.parse(",".join(f"group=g{n}:50%" for n in range(6))))
    thinned = sampling.rows(batch(list(range(2000))))
    before, after = splits_of(whole), splits_of(thinned)
    lost = {sample for sample in before if sample not in after}
    assert lost and {before[sample] for sample in lost} == {"train"}
    assert {sample: after[sample] for sample in after if sample is not None} == {
        sample: split for sample, split in before.items() if sample not in lost
    }
    assert Counter(thinned.column("_dropped").to_pylist())["sampled_out"] == len(lost)


def test_parquet_is_measured_in_arrow_bytes() -> None:
    words = pa.array([["ab", "c"], [], ["defg"]], pa.list_(pa.string()))
    assert logical_bytes(SCHEMA["s"], words).to_pylist() == [4 + 4 + 2 + 4 + 1, 4, 4 + 4 + 4]
    field = Field(name="n", dtype="int64", nullable=True)
    assert logical_bytes(field, pa.array([1, None], pa.int64())).to_pylist() == [8, 8]
    tensor = Field(name="t", dtype="uint8", shape=(3,))
    assert logical_bytes(tensor, pa.array([b"abc"], pa.binary())).to_pylist() == [7]


@pytest.mark.parametrize(
    ("records", "size", "expected"),
    [
        (10_000_000, 10_000_000 * 100, 20971),  # 2 MiB of 100 bytes each
        (10_000, 10_000 * 800, 157),  # a small set: 64 blocks
        (10, 10 * 800, 1),  # a tiny one: a record a block
        (100, 100 << 23, 1),  # a record is larger than a block
    ],
)
def test_block_sizes(records: int, size: int, expected: int) -> None:
    assert block_records(records, size) == expected


def test_blocks_of_a_stated_size_of_folds_and_of_appends() -> None:
    folds, parts = ({f"{first}-0": (10_000, 8_000_000), f"{first}-1": (9_000, 7_200_000)} for first in ("fold", "part"))
    assert plan_shards(parts, 4_000_000).splits == (("part-0", 2, 157), ("part-1", 2, 141))
    assert plan_shards(folds, 4_000_000).splits == (("fold-0", 2, 141), ("fold-1", 2, 141))
    assert plan_shards(parts, 4_000_000, 80_000).splits == (("part-0", 2, 100), ("part-1", 2, 100))
    assert plan_shards(parts, 4_000_000, None, {"part-1": 7, "gone": 3}).splits == (
        ("part-0", 2, 157),
        ("part-1", 2, 7),
    )


def test_partitions_and_shards_correspond() -> None:
    table = ShardTable((("test", 2, 5), ("train", 3, 7)))
    assert [table.locate(n)[:2] for n in range(table.total)] == [
        ("test", 0), ("test", 1), ("train", 0), ("train", 1), ("train", 2),
    ]  # fmt: skip


def frame(spark: SparkSession, rows: pa.RecordBatch) -> DataFrame:
    ddl = "n bigint, s array<string>, key string, group string, _source int, _position bigint, _occurrence bigint"
    return spark.createDataFrame(rows.select(ddl_names(ddl)).to_pylist(), ddl)


def ddl_names(ddl: str) -> list[str]:
    return [column.split()[0] for column in ddl.split(", ")]


def write(df: DataFrame, url: Path, read: int, **more: Any) -> None:
    options: dict[str, Any] = {"split": SplitSpec.parse("50/50"), "fmt": "tfrecord", "shard_bytes": 1 << 20, "seed": 0}
    options["origin"] = Origin(sources=(SourceInfo("in.csv", 1, "0" * 64),), read=read)
    write_dataset(df, str(url), schema=SCHEMA, id_columns=("key",), **{**options, **more})


@pytest.mark.slow
def test_one_sample_id_twice_names_both_records(spark: SparkSession, tmp_path: Path) -> None:
    from lockstep.etl.spark.errors import translating_errors

    rows = batch([1, 2, 3, 4, 5, 6, 7, 8, 3])  # occurrence 0 both times
    with (
        pytest.raises(DataError, match="two records have one sample id") as caught,
        translating_errors(spark, "testing"),
    ):
        write(frame(spark, rows), tmp_path / "out", 9)
    assert caught.value.got == "in.csv at 2, in.csv at 8"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_repeated_records_are_numbered(spark: SparkSession, tmp_path: Path) -> None:
    write(frame(spark, batch([1, 2, 3, 4, 5, 6, 7, 8, 3])).drop("_occurrence"), tmp_path / "out", 9)
    assert (tmp_path / "out" / "_manifest.json").exists()


@pytest.mark.slow
def test_columns_that_do_not_fit_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    df = frame(spark, batch([1, 2]))
    for wrong in (df.drop("n"), df.selectExpr("*", "'x' AS t").drop("key"), df.withColumn("n", df["n"].cast("string"))):
        with pytest.raises(ConfigError, match="cannot be used"):
            write(wrong, tmp_path / "out", 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rejected_input_lies_where_it_is_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    """At a URL of its own, or nowhere; what a killed job left goes first."""
    rejected = spark.createDataFrame([(0, 9, None, "why", bytearray(b"raw"), 3, "0" * 64)], c.ddl_of(c.REJECTED))
    source = SourceInfo("in.csv", 1, "0" * 64)
    origin = Origin(sources=(source,), read=21, quarantined=1, quarantined_raw_bytes=3, quarantine=rejected)
    df = frame(spark, batch(list(range(20))))
    with Staging(str(tmp_path / "left")) as left:
        shutil.copytree(left.root, tmp_path / "kept")
    (tmp_path / "kept").rename(left.root)
    os.utime(Path(left.root) / SIGN_NAME, (0, 0))
    for output, name in (("none", "none"), ("out", "apart")):  # as if jobs for these outputs had been refused before
        with Staging(str(tmp_path / f"_quarantine-{name}"), part_of=str(tmp_path / output)) as refused:
            refused.publish(None)
    parquet = {"fmt": "parquet", "row_group_bytes": 100, "clean": True}
    write(df, tmp_path / "none", 21, origin=origin, quarantine="none", **parquet)
    write(df, tmp_path / "out", 21, origin=origin, quarantine=str(tmp_path / "apart"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apart", "none", "out"]
    assert (tmp_path / "apart").stat().st_mode & 0o777 == 0o700
    kept = pq.read_table(tmp_path / "apart" / "part-00000.parquet").to_pylist()
    assert [(row["source"], row["position"], row["reason"]) for row in kept] == [("in.csv", 9, "why")]
    for name in ("none", "out"):
        manifest = load_dataset(str(tmp_path / name))
        assert manifest.counts.quarantined == 1 and not verify(str(tmp_path / name))
        assert not any("_quarantine" in path for path in tree(tmp_path / name))
    groups = pq.ParquetFile(tmp_path / "none" / "split=train" / "part-00000.parquet").metadata
    assert groups.row_group(0).num_rows == load_dataset(str(tmp_path / "none")).splits["train"].block_records == 3
    with pytest.raises(ExistsError):
        write(df, tmp_path / "more", 21, origin=origin, quarantine=str(tmp_path / "apart"))


def test_an_output_below_a_file_is_refused_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(ExistsError, match="is a file") as caught:
            refuse_existing(str(output))
        assert caught.value.exit_code == 2 and caught.value.next_step
    refuse_existing(str(tmp_path / "a" / "b" / "out"))


def test_equal_ids_are_known_behind_spark() -> None:
    """Only their error is told anew by the columns of the ids."""
    for kind in (SameIdError, DataError):
        found = from_text("in a trace: " + to_wire(kind("what", got="1", allowed="2", next_step="3")) + " and on")
        assert type(found) is kind and found.got == "1"
