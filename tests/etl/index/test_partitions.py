"""Partitions of indexed files: as columns what pyarrow and Spark make of the folders, as splits their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet
from lockstep.etl.index.partitions import kinds_of
from lockstep.etl.table_files import partition_of
from lockstep.storage.errors import ConfigError, LockstepError
from tests.etl.index.test_parquet import rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\x00"), min_size=1, max_size=6)


def values(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)


@given(st.lists(st.tuples(TEXT | st.none(), st.integers(-9, 9)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_values_are_those_that_pyarrow_wrote_into_folders(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str | None, int]]
) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    table = pa.table({"city": pa.array([row[0] for row in rows], pa.string()), "n": [row[1] for row in rows]})
    hive = ds.partitioning(pa.schema([("city", pa.string())]), flavor="hive")
    ds.write_dataset(table, folder, format="parquet", partitioning=hive)
    manifest = index_parquet(ParquetIndexConfig(url=str(folder)))
    found = rows_of(folder, manifest)
    read = ds.dataset(folder, partitioning=hive, exclude_invalid_files=False).to_table().to_pylist()
    kind = next(field["dtype"] for field in manifest.schema["fields"] if field["name"] == "city")
    assert kind in ("string", "int64", "float64")
    as_text = [{**row, "city": None if row["city"] is None else str(row["city"])} for row in found]
    assert values(as_text, "city", "n") == values(read, "city", "n")
    assert len(read) == len(rows) and {row["city"] for row in as_text} == {row[0] for row in rows}


@pytest.mark.slow
def test_types_and_values_are_those_of_plain_spark(tmp_path: Path, spark: SparkSession) -> None:
    rows = [("new york", 2026, 0.5, 1), ("a=b/c%", 2025, 1.25, 2), (None, 2025, 0.5, 3)]
    df = spark.createDataFrame(rows, "city string, year int, share double, n bigint")
    df.write.partitionBy("city", "year", "share").parquet(str(tmp_path / "theirs"))
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path / "theirs"), id_columns=("n", "year")))
    names = ("city", "year", "share", "n")
    back = [row.asDict() for row in spark.read.parquet(str(tmp_path / "theirs")).collect()]
    found = rows_of(tmp_path / "theirs", manifest)
    assert values(found, *names) == values(back, *names) == sorted(rows, key=repr)
    dtypes = {field["name"]: field["dtype"] for field in manifest.schema["fields"]}
    assert dtypes == {"sample_id": "int64", "n": "int64", "city": "string", "year": "int64", "share": "float64"}


def written(folder: Path, *paths: str) -> Path:
    for number, path in enumerate(paths):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [10 * number, 10 * number + 1]}), folder / path)
    return folder


def test_a_partition_names_the_splits(tmp_path: Path) -> None:
    written(
        tmp_path, "split=train/year=2025/a.parquet", "split=train/year=2026/a.parquet", "split=test/year=2026/b.parquet"
    )
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path), split_by="split"))
    read = ds.dataset(tmp_path, partitioning="hive", exclude_invalid_files=True).to_table()
    for split in ("train", "test"):
        wanted = read.filter(pc.equal(read["split"], split)).drop_columns("split").to_pylist()
        assert values(rows_of(tmp_path, manifest, split), "n", "year") == values(wanted, "n", "year")
    assert sorted(manifest.splits) == ["test", "train"]


@pytest.mark.parametrize(
    ("paths", "flags", "words"),
    [
        (["a=1/x.parquet", "x.parquet"], {}, ("x.parquet", "other partitions")),
        (["a=1/x.parquet", "b=1/x.parquet"], {}, ("b=1/x.parquet", "other partitions")),
        (["a=1/a=2/x.parquet"], {}, ("other partitions",)),
        (["n=1/x.parquet"], {}, ("`n`", "a column and a partition")),
        (["split=a/x.parquet"], {}, ("`split`", "--split-by")),
        (["a=1/x.parquet"], {"split_by": "b"}, ("`b` is no partition",)),
        (["x.parquet"], {"split_by": "b"}, ("`b` is no partition",)),
        (["a=__HIVE_DEFAULT_PARTITION__/x.parquet"], {"split_by": "a"}, ("in no split",)),
        (["a=no%20name/x.parquet"], {"split_by": "a"}, ("split name",)),
        (["day=2026-01-01/x.parquet"], {}, ("`day`", "date", "--exclude day")),
        (["a=1/x.parquet", "a=__HIVE_DEFAULT_PARTITION__/x.parquet"], {"id_columns": ("a", "n")}, ("`a` is null",)),
        (["a=1/x.parquet", "a=__HIVE_DEFAULT_PARTITION__/x.parquet"], {"label": "a"}, ("`a`", "null")),
    ],
)
def test_what_cannot_be_partitions_is_refused(
    tmp_path: Path, paths: list[str], flags: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(LockstepError) as caught:
        index_parquet(ParquetIndexConfig(url=str(written(tmp_path, *paths)), **flags))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_declared_partition_has_its_type(tmp_path: Path) -> None:
    written(tmp_path, "code=007/x.parquet", "code=8/y.parquet")
    schema = '[[fields]]\nname = "code"\ndtype = "{}"\n[[fields]]\nname = "n"\ndtype = "int64"\n'
    (tmp_path / "s.toml").write_text(schema.format("string"))
    manifest = index_parquet(ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "s.toml")))
    assert [row["code"] for row in rows_of(tmp_path, manifest)] == ["007", "007", "8", "8"]
    (tmp_path / "_manifest.json").unlink()
    (tmp_path / "s.toml").write_text(schema.format("int64"))
    with pytest.raises(ConfigError, match="code=007"):
        index_parquet(ParquetIndexConfig(url=str(tmp_path), schema=str(tmp_path / "s.toml")))


def test_names_and_values_are_decoded() -> None:
    path = "x/a%20b=c%2Fd/e=__HIVE_DEFAULT_PARTITION__/f=/g=h=i/part=1.parquet"
    assert partition_of(path) == (("a b", "c/d"), ("e", None), ("f", ""), ("g", "h=i"))
    assert kinds_of([(("a", "1"),), (("a", None),)]) == {"a": "bigint"} and kinds_of([(("a", None),)]) == {
        "a": "string"
    }
    assert kinds_of([(("a", "07"),), (("a", "1"),)]) == {"a": "string"}
