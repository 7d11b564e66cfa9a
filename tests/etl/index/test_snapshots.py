"""Delta and Iceberg tables as datasets: each version has the rows that the table's own reader gives, or is refused."""

from __future__ import annotations

import base64
import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType
from pyroaring import BitMap

from lockstep.etl import tables
from lockstep.etl.index.parquet import ParquetIndexConfig, index_parquet
from lockstep.etl.input.snapshots import open_snapshot
from lockstep.etl.tables import TableConfig
from lockstep.jobs import index
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.storage.verify import verify
from tests.etl.index.test_parquet import rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[tuple[int, str | None]]


def indexed(url: Path, kind: str, version: int | None = None, **flags: Any) -> DatasetManifest:
    (url / "_manifest.json").unlink(missing_ok=True)
    return index_parquet(ParquetIndexConfig(url=str(url), table=kind, table_version=version, **flags))


def found_rows(url: Path, manifest: DatasetManifest, *names: str) -> list[tuple[Any, ...]]:
    rows = [row for split in manifest.splits for row in rows_of(url, manifest, split)]
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)


def wanted_rows(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in names) for row in table.to_pylist()), key=repr)


def table_of(rows: Rows) -> pa.Table:
    return pa.table(
        {"id": pa.array([row[0] for row in rows], pa.int64()), "city": pa.array([row[1] for row in rows], pa.string())}
    )


CITIES = st.sampled_from(["a", "b c", "007", "ü/ö", "x=y%", ""]) | st.none()
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(CITIES, min_size=1, max_size=5)),
        st.tuples(st.just("delete"), st.integers(0, 12)),
        st.tuples(st.just("compact"), st.just(0)),
    ),
    min_size=1,
    max_size=5,
)


@given(STEPS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_each_version_of_a_delta_table_has_its_rows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]], partitioned: bool
) -> None:
    url = tmp_path_factory.mktemp("lake") / "table"
    by = ["city"] if partitioned else None
    write_deltalake(url, table_of([(0, "a")]), partition_by=by)
    number = 1
    for step, value in steps:
        if step == "append":
            write_deltalake(url, table_of([(number + n, city) for n, city in enumerate(value)]), mode="append")
            number += len(value)
        elif step == "delete":
            DeltaTable(url).delete(f"id = {value}")
        else:
            DeltaTable(url).optimize.compact()
    last = DeltaTable(url).version()
    for version in range(last + 1):
        wanted = wanted_rows(DeltaTable(url, version=version).to_pyarrow_table(), "id", "city")
        if not wanted:
            with pytest.raises(LockstepError, match="hold no row"):
                indexed(url, "delta", version)
            continue
        manifest = indexed(url, "delta", version, id_columns=("id",))
        assert found_rows(url, manifest, "id", "city") == wanted
        assert manifest.created_by["config"]["table"] == {"format": "delta", "version": version}
        dtypes = {field["name"]: field["dtype"] for field in manifest.schema["fields"]}
        assert dtypes == {"sample_id": "int64", "id": "int64", "city": "string"}
    assert open_snapshot("delta", str(url), None).version == last
    assert not (url / "_manifest.json").exists() or not verify(str(url))


def test_partitions_of_a_delta_table_have_its_types_and_name_splits(tmp_path: Path) -> None:
    rows = pa.table(
        {"n": [1, 2, 3], "year": [2025, 2026, None], "part": ["train", "test", "train"], "share": [0.5, 1.0, 2.0]}
    )
    write_deltalake(tmp_path / "t", rows, partition_by=["part", "year", "share"])
    manifest = indexed(tmp_path / "t", "delta", split_by="part")
    assert {name: split.records for name, split in manifest.splits.items()} == {"train": 2, "test": 1}
    names = ("n", "year", "share")
    assert found_rows(tmp_path / "t", manifest, *names) == wanted_rows(rows, *names)


def test_columns_that_older_files_lack_are_null_and_those_that_were_dropped_are_absent(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", table_of([(1, "a")]))
    more = table_of([(2, "b")]).append_column("x", pa.array([0.5]))
    write_deltalake(tmp_path / "t", more, mode="append", schema_mode="merge")
    manifest = indexed(tmp_path / "t", "delta")
    wanted = wanted_rows(DeltaTable(tmp_path / "t").to_pyarrow_table(), "id", "x")
    assert found_rows(tmp_path / "t", manifest, "id", "x") == wanted == [(1, None), (2, 0.5)]


def inline_vector(rows: list[int]) -> dict[str, Any]:
    """A deletion vector of Delta's protocol, stored in the log."""
    bitmap = bytes(BitMap(rows).serialize())
    data = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    padded = data + bytes(-len(data) % 4)
    z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    b85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    text = base64.b85encode(padded).decode().translate(str.maketrans(b85, z85))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(rows)}


def test_deletion_vectors_are_refused_by_name(tmp_path: Path) -> None:
    url = tmp_path / "t"
    write_deltalake(url, table_of([(n, "a") for n in range(4)]), configuration={"delta.enableDeletionVectors": "true"})
    assert len(found_rows(url, indexed(url, "delta"), "id")) == 4  # the feature alone deletes nothing
    first = url / "_delta_log" / f"{0:020d}.json"
    add = next(doc["add"] for doc in map(json.loads, first.read_text().splitlines()) if "add" in doc)
    remove = {
        "path": add["path"],
        "dataChange": True,
        "deletionTimestamp": 1,
        "partitionValues": {},
        "size": add["size"],
    }
    actions = [{"remove": remove}, {"add": {**add, "deletionVector": inline_vector([1])}}]
    (url / "_delta_log" / f"{1:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    assert len(DeltaTable(url).deletion_vectors().read_all()) == 1, "the vector is one that deltalake reads"
    with pytest.raises(LockstepError, match="rows of 1 files") as caught:
        indexed(url, "delta")
    assert add["path"] in caught.value.got and "PURGE" in caught.value.next_step
    assert len(found_rows(url, indexed(url, "delta", 0), "id")) == 4


def test_column_mapping_is_refused_by_name(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", table_of([(1, "a")]))
    log = tmp_path / "t" / "_delta_log" / f"{0:020d}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for doc in lines:
        if "metaData" in doc:
            doc["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"
            schema = json.loads(doc["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                stored = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
                field["metadata"] = stored
            doc["metaData"]["schemaString"] = json.dumps(schema)
        if "protocol" in doc:
            doc["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
    log.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(LockstepError, match="have other names in its files"):
        indexed(tmp_path / "t", "delta")


def iceberg(folder: Path, rows: pa.Table, spec: PartitionSpec | None = None, **more: Any) -> Any:
    catalog = InMemoryCatalog("c", warehouse=str(folder))
    catalog.create_namespace("d")
    return catalog.create_table("d.t", schema=rows.schema, **({} if spec is None else {"partition_spec": spec}), **more)


@given(STEPS)
@settings(max_examples=10, deadline=None)
def test_each_snapshot_of_an_iceberg_table_has_its_rows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    table = iceberg(folder, table_of([]))
    table.append(table_of([(0, "a")]))
    number = 1
    for step, value in steps:
        if step == "append":
            table.append(table_of([(number + n, city) for n, city in enumerate(value)]))
            number += len(value)
        elif step == "delete" and value in table.scan().to_arrow()["id"].to_pylist():
            table.delete(f"id == {value}")
    url = Path(table.location())
    for snapshot in table.snapshots():
        wanted = wanted_rows(table.scan(snapshot_id=snapshot.snapshot_id).to_arrow(), "id", "city")
        if not wanted:
            continue
        manifest = indexed(url, "iceberg", snapshot.snapshot_id, id_columns=("id",))
        assert found_rows(url, manifest, "id", "city") == wanted
        assert manifest.created_by["config"]["table"]["version"] == snapshot.snapshot_id
    assert open_snapshot("iceberg", str(url), None).version == table.current_snapshot().snapshot_id


def test_an_iceberg_table_in_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "city", StringType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "city"))
    rows = table_of([(1, "a b"), (2, None), (3, "a b")])
    catalog = InMemoryCatalog("c", warehouse=str(tmp_path))
    catalog.create_namespace("d")
    table = catalog.create_table("d.t", schema=schema, partition_spec=spec)
    table.append(rows)
    url = Path(table.location())
    assert found_rows(url, indexed(url, "iceberg"), "id", "city") == wanted_rows(rows, "id", "city")
    # Files of Hive that a table took over have their partitions in the folders' names alone.
    for path in url.rglob("*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns("city"), path)
    sizes = {str(path): path.stat().st_size for path in url.rglob("*.parquet")}
    monkeypatch.setattr(DataFile, "file_size_in_bytes", property(lambda file: sizes[file.file_path]))
    with pytest.raises(LockstepError, match="lacks column `city`"):
        indexed(url, "iceberg")


def test_columns_of_iceberg_that_changed_names_are_refused_and_new_ones_are_null(tmp_path: Path) -> None:
    table = iceberg(tmp_path, table_of([]))
    table.append(table_of([(1, "a")]))
    with table.update_schema() as change:
        change.add_column("x", DoubleType())
    table.append(table_of([(2, "b")]).append_column("x", pa.array([0.5])))
    url = Path(table.location())
    assert found_rows(url, indexed(url, "iceberg"), "id", "x") == wanted_rows(table.scan().to_arrow(), "id", "x")
    with table.update_schema() as change:
        change.delete_column("x")
    manifest = indexed(url, "iceberg")
    assert [field["name"] for field in manifest.schema["fields"]] == ["sample_id", "id", "city"]
    with table.update_schema() as change:
        change.rename_column("city", "town")
    with pytest.raises(LockstepError, match="`town` had another name") as caught:
        indexed(url, "iceberg")
    assert "`city`" in caught.value.got
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("town")
        change.add_column("city", StringType())
    with pytest.raises(LockstepError, match="`city` had another name"):
        indexed(url, "iceberg")


def test_delete_files_of_iceberg_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.table import DataScan

    table = iceberg(tmp_path, table_of([]))
    table.append(table_of([(1, "a")]))
    url, plain = Path(table.location()), DataScan.plan_files

    class WithDeletes:
        """A task of a scan as pyiceberg gives it for merge-on-read, which it does not write itself."""

        def __init__(self, task: Any) -> None:
            self.file, self.delete_files = task.file, {task.file}

    monkeypatch.setattr(DataScan, "plan_files", lambda scan: map(WithDeletes, plain(scan)))
    with pytest.raises(LockstepError, match=r"rows of .*parquet are deleted") as caught:
        indexed(url, "iceberg")
    assert "rewrite_data_files" in caught.value.next_step


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_what_is_no_table_or_version_is_refused(tmp_path: Path, kind: str) -> None:
    pq.write_table(table_of([(1, "a")]), tmp_path / "a.parquet")
    with pytest.raises(LockstepError):
        indexed(tmp_path, kind)
    if kind == "delta":
        write_deltalake(tmp_path / "t", table_of([(1, "a")]))
        url = tmp_path / "t"
    else:
        table = iceberg(tmp_path, table_of([]))
        table.append(table_of([(1, "a")]))
        url = Path(table.location())
    with pytest.raises(ConfigError) as caught:
        indexed(url, kind, 77)
    assert "--table-version" in caught.value.next_step


def test_two_newest_metadata_files_are_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path, table_of([]))
    table.append(table_of([(1, "a")]))
    newest = Path(table.metadata_location)
    (newest.parent / newest.name.replace("-", "-0", 1)).write_bytes(newest.read_bytes())
    with pytest.raises(ConfigError, match="which metadata file"):
        indexed(Path(table.location()), "iceberg")
    (newest.parent / "version-hint.text").write_text(newest.name)
    assert len(found_rows(Path(table.location()), indexed(Path(table.location()), "iceberg"), "id")) == 1


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, package in (("delta", "deltalake"), ("iceberg", "pyiceberg")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"needs the package {package}") as caught:
            open_snapshot(kind, str(tmp_path), None)
        assert caught.value.next_step == "pip install -r requirements-lake.txt"


def test_the_job_prints_the_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "t"
    write_deltalake(url, table_of([(1, "a")]))
    write_deltalake(url, table_of([(2, "b")]), mode="append")
    assert index.main([str(url), "--format", "delta", "--table-version", "0"]) == 0
    printed = capsys.readouterr().out
    assert "1 files, 1 records" in printed and "delta table, version 0" in printed
    for flags in (["--table-version", "0"], ["--format", "parquet", "--table-version", "0"],
                  ["--format", "delta", "--pattern", "*"]):  # fmt: skip
        with pytest.raises(ConfigError):
            index.main([str(url), *flags])


def made_by_spark(spark: SparkSession, url: Path, output: Path, kind: str, version: str) -> DatasetManifest:
    config = TableConfig(
        inputs=(str(url),), input_format=kind, table_version=version, id_columns=("id",), output=str(output),
        split="1/1", fmt="parquet",
    )  # fmt: skip
    return tables.run(spark, config)


@pytest.mark.slow
def test_etl_table_reads_the_same_rows_and_ids_without_a_jar(tmp_path: Path, spark: SparkSession) -> None:
    url = tmp_path / "t"
    write_deltalake(url, table_of([(0, "007"), (1, "x y/%"), (2, None), (3, "8")]), partition_by=["city"])
    more = table_of([(4, "8")]).append_column("x", pa.array([0.5]))
    write_deltalake(url, more, mode="append", schema_mode="merge")
    DeltaTable(url).delete("id = 1")
    last = DeltaTable(url).version()
    for version, number in (("0", 0), ("latest", last)):
        made = made_by_spark(spark, url, tmp_path / f"made-{version}", "delta", version)
        assert made.created_by["config"]["table_version"] == {"format": "delta", "version": number}
        names = ("id", "city") if version == "0" else ("id", "city", "x")
        table = DeltaTable(url, version=number).to_pyarrow_table()
        assert found_rows(tmp_path / f"made-{version}", made, *names) == wanted_rows(table, *names)
        manifest = indexed(url, "delta", number, id_columns=("id",))
        assert manifest.schema == made.schema
        with_ids = found_rows(url, manifest, "sample_id", *names)
        assert with_ids == found_rows(tmp_path / f"made-{version}", made, "sample_id", *names)
    table = iceberg(tmp_path / "ice", table_of([]))
    table.append(table_of([(n, f"c{n % 3}") for n in range(60)]))
    table.delete("id == 1")
    place = Path(table.location())
    made = made_by_spark(spark, place, tmp_path / "made-ice", "iceberg", "latest")
    assert found_rows(tmp_path / "made-ice", made, "id", "city") == wanted_rows(table.scan().to_arrow(), "id", "city")
    with table.update_schema() as change:
        change.rename_column("city", "town")
    with pytest.raises(LockstepError, match="`town` had another name"):
        made_by_spark(spark, place, tmp_path / "made-none", "iceberg", "latest")


@pytest.mark.parametrize(
    "wrong",
    [
        {"table_version": "1.5", "input_format": "delta"},
        {"table_version": "1"},
        {"table_version": "1", "input_format": "delta", "inputs": ("a", "b")},
    ],
)
def test_versions_of_what_is_no_table_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--table-version"):
        TableConfig(**{"inputs": ("t",), "output": "o", "id_columns": ("id",), **wrong})
